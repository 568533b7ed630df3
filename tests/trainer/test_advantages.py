"""What holds for all advantage estimators: groups by key, siblings once, masks, custom ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer.advantage_cases import EVERY, GROUPED, advantages, batch, complete
from trainer.algorithms.advantages import estimate_advantages, whiten
from trainer.settings import AlgorithmSettings


def estimate(name, *args, std=True, normalize=False, kl_coef=0.0, **kwargs):
    algorithm = AlgorithmSettings(
        advantage_estimator=name,
        grpo_std_normalization=std,
        normalize_advantages=normalize,
        kl_coef=kl_coef,
    )
    return estimate_advantages(batch(*args, **kwargs), algorithm)


@pytest.mark.parametrize(
    ("name", "std", "expected"),
    [
        ("grpo", True, [1.5, -0.5, -0.5, -0.5]),
        ("grpo", False, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", True, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("mean_baseline", True, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(name, std, expected):
    advantages = estimate(name, [1, 0, 0, 0], std=std)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, atol=1e-5)


@pytest.mark.parametrize("name", sorted(GROUPED))
@pytest.mark.parametrize("reward", [0.0, 0.1, 7.3])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_equal_rewards_and_single_samples_give_exactly_zero(name, reward, n):
    assert estimate(name, [reward] * n).tolist() == [0.0] * n


def test_siblings_count_once():
    """Three segments of one successful rollout, one failed rollout: the mean is 1/2, not 3/4."""
    rollouts = [7, 7, 7, 9]
    assert estimate("mean_baseline", [1, 1, 1, 0], rollouts=rollouts).tolist() == [
        0.5,
        0.5,
        0.5,
        -0.5,
    ]
    assert estimate("rloo", [1, 1, 1, 0], rollouts=rollouts).tolist() == [1, 1, 1, -1]
    np.testing.assert_allclose(
        estimate("grpo", [1, 1, 1, 0], rollouts=rollouts),
        np.array([1, 1, 1, -1]) / np.sqrt(2),
        atol=2e-6,
    )


def test_groups_are_keys_not_shapes():
    """Groups of 3 and 5, interleaved: a reshape to 2 × 4 would mix them."""
    groups = [5, 2, 5, 2, 2, 5, 2, 2]
    rewards = [1, 0, 0, 1, 0, 0, 0, 0]
    np.testing.assert_allclose(
        estimate("mean_baseline", rewards, groups=groups),
        [2 / 3, -1 / 5, -1 / 3, 4 / 5, -1 / 5, -1 / 3, -1 / 5, -1 / 5],
        atol=1e-7,
    )


def test_advantages_are_spread_over_loss_tokens_only():
    advantages = estimate("mean_baseline", [1, 0], lengths=[3, 2], mask=[1, 0, 1, 1, 1])
    assert advantages.tolist() == [0.5, 0.0, 0.5, -0.5, -0.5]


def test_kl_lowers_the_reward_of_the_whole_rollout():
    """Rewards 1 − 0.5·(2 + 1) = −0.5 and 0 − 0.5·1: the masked NaN does not count."""
    kwargs = {"lengths": [2, 2], "mask": [1, 1, 1, 0], "kl": [2, 1, 1, np.nan]}
    advantages = estimate("mean_baseline", [1, 0], kl_coef=0.5, **kwargs)
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
    advantages = estimate("mean_baseline", [1, 0], kl_coef=1.0, **kwargs)
    assert advantages.tolist() == [-0.5, -0.5, 0.5, 0.0]
    with pytest.raises(InvalidArgument, match="reference"):
        estimate("mean_baseline", [1, 0], kl_coef=1.0)


def test_whitening():
    """Tokens 0.5, 0.5, −0.5: mean 1/6, variance ((1/3)²·2 + (2/3)²)/2 = 1/3."""
    advantages = estimate(
        "mean_baseline", [1, 0], lengths=[2, 2], mask=[1, 1, 1, 0], normalize=True
    )
    np.testing.assert_allclose(
        advantages, np.array([1 / 3, 1 / 3, -2 / 3, 0]) * np.sqrt(3), atol=1e-6
    )


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0], [1, 1, 1]])
def test_whitening_of_nothing_one_or_equal_tokens_is_zero(mask):
    advantages = np.full(3, 0.1, np.float32)
    assert whiten(advantages, np.array(mask, np.uint8)).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_sample_that_is_masked_throughout_contributes_nothing_and_breaks_nothing(name, normalize):
    masked = complete([1, 0, 1], lengths=[2, 2, 1], mask=[0, 0, 1, 1, 1])
    settings = AlgorithmSettings(
        advantage_estimator=name, normalize_advantages=normalize, gamma=0.5, kl_coef=0.0
    )
    got = estimate_advantages(masked, settings)
    assert np.isfinite(got).all()
    assert got[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lengths", [[0, 0], [2, 1]])
def test_a_step_without_a_loss_token_is_all_zeros(name, lengths):
    nothing = complete([1, 0], lengths=lengths, mask=[0] * sum(lengths))
    got = estimate_advantages(nothing, AlgorithmSettings(advantage_estimator=name))
    assert got.tolist() == [0.0] * sum(lengths)


@pytest.mark.parametrize("name", EVERY)
def test_with_masked_rollouts_excluded_the_others_get_what_they_get_without_them(name):
    """The masked rollout 2 would pull the mean up; excluded, it might as well not be there."""
    settings = AlgorithmSettings(
        advantage_estimator=name, exclude_masked_rollouts=True, gdpo_whitening="rollout"
    )
    rewards, lengths = [1, 0, 9, 0.5], [2, 1, 2, 1]
    masked = complete(rewards, lengths=lengths, mask=[1, 1, 1, 0, 0, 1])
    without = complete([1, 0, 0.5], lengths=[2, 1, 1])
    got = estimate_advantages(masked, settings)
    expected = estimate_advantages(without, settings)
    assert got[[0, 1, 2, 5]].tobytes() == expected.tobytes()
    assert got[3:5].tolist() == [0.0, 0.0]


def test_the_reward_of_a_masked_rollout_counts_in_the_mean_unless_it_is_excluded():
    """Means 2/3 and 1/2."""
    said = {"lengths": [1, 1, 1], "mask": [1, 1, 0]}
    np.testing.assert_allclose(
        advantages("dr_grpo", [1, 0, 1], **said), [1 / 3, -2 / 3, 0], atol=1e-7
    )
    assert advantages("dr_grpo", [1, 0, 1], exclude_masked_rollouts=True, **said).tolist() == [
        0.5,
        -0.5,
        0.0,
    ]


def test_differing_siblings_are_refused():
    with pytest.raises(InvalidArgument, match="rollout_id 4, samples 0 and 1"):
        batch([1, 0], rollouts=[4, 4])
    with pytest.raises(InvalidArgument, match="one group_index"):
        batch([1, 1], rollouts=[4, 4], groups=[0, 1])


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(reward):
    with pytest.raises(InvalidArgument, match="rollout_id 1"):
        batch([0, reward])


def test_lengths_that_disagree_are_refused():
    with pytest.raises(InvalidArgument, match="loss_mask_N"):
        batch([0, 1], lengths=[1, 2], mask=[1, 1])


def reversed_rewards(batch, settings):
    """A custom estimator for the test below."""
    return batch.spread(-batch.rollout_rewards())


def ones_everywhere(batch, settings):
    return np.ones(len(batch.loss_mask_N), np.float32)


def test_custom_estimator_gives_nothing_to_masked_tokens():
    name = f"{__name__}:ones_everywhere"
    assert estimate(name, [1, 0], lengths=[2, 1], mask=[1, 0, 1]).tolist() == [1, 0, 1]


def wrong_shape(batch, settings):
    return np.zeros(1, np.float32)


def not_finite(batch, settings):
    return np.full(len(batch.loss_mask_N), np.nan, np.float32)


def fails(batch, settings):
    raise ZeroDivisionError("on purpose")


def nothing_at_all(batch, settings):
    return None


def test_custom_estimator():
    assert estimate(f"{__name__}:reversed_rewards", [1, 0]).tolist() == [-1, 0]
    assert estimate(f"{__name__}.reversed_rewards", [1, 0]).tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpro", "grpo, .*mean_baseline, .*rloo"),
        ("no_such_module:f", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
        (f"{__name__}:np", "module"),
        (f"{__name__}:wrong_shape", r"shape \(1,\)"),
        (f"{__name__}:not_finite", "2 values"),
        ("no_such_module.f", "ModuleNotFoundError"),
        (":f", "ValueError"),
        ("os:getcwd", "(?s)os:getcwd, batch of 2 samples, rollouts 0, 1.*TypeError"),
        ("os.getcwd", "TypeError"),
        (f"{__name__}:fails", "ZeroDivisionError: on purpose"),
        (f"{__name__}:nothing_at_all", "NoneType"),
    ],
)
def test_estimators_that_cannot_work(name, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        estimate(name, [1, 0])
    assert "--advantage-estimator" in str(caught.value)


@st.composite
def rollouts(draw):
    """Samples with siblings and uneven groups, in any order."""
    n_rollouts = draw(st.integers(1, 8))
    samples = []
    for rollout in range(n_rollouts):
        group = draw(st.integers(0, 2))
        reward = draw(st.sampled_from([0.0, 1.0, 0.1, 2.5]) | st.floats(0, 100))
        samples += [(reward, group, rollout)] * draw(st.integers(1, 3))
    return draw(st.permutations(samples))


@settings(max_examples=25)
@given(rollouts(), st.sampled_from(EVERY), st.randoms(use_true_random=False))
def test_order_of_samples_changes_no_bit(samples, name, random):
    """Without whitening over tokens, whose sum is taken in order."""
    order = list(range(len(samples)))
    random.shuffle(order)
    algorithm = AlgorithmSettings(advantage_estimator=name, estimator_whitening=name == "gdpo")

    def by_tokens(samples):
        rewards, groups, ids = (list(x) for x in zip(*samples, strict=True))
        return estimate_advantages(complete(rewards, groups=groups, rollouts=ids), algorithm)

    straight, shuffled = by_tokens(samples), by_tokens([samples[i] for i in order])
    assert straight[order].tobytes() == shuffled.tobytes()
