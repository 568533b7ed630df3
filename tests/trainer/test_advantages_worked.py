"""Advantage estimators against numbers worked out by hand; how is said beside each.

Where nothing else is said, a rollout is one sample with one token, and all are of one group.
"""

from __future__ import annotations

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from tests.trainer.advantage_cases import advantages, batch, full
from trainer.algorithms.advantages import Estimate, estimate
from trainer.settings import AlgorithmSettings

SIBLINGS = {"rollouts": [7, 7, 7, 9]}
"""Three segments of one rollout, and another rollout of one segment."""


def near(*expected):
    """Up to the 1e-6 that is added to what is divided by."""
    return pytest.approx(list(expected), abs=4e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The rewards of the two rollouts are 1 and 0: mean 1/2, not the 3/4 of the four samples.
        ("dr_grpo", [0.5, 0.5, 0.5, -0.5]),
        ("mean_baseline", [0.5, 0.5, 0.5, -0.5]),
        # Unbiased deviation sqrt((1/4 + 1/4) / 1) = 1/sqrt 2, so ±(1/2)·sqrt 2.
        ("grpo", [2**-0.5] * 3 + [-(2**-0.5)]),
        ("group_norm", [2**-0.5] * 3 + [-(2**-0.5)]),
        # Each stands against the one other rollout.
        ("rloo", [1, 1, 1, -1]),
        # (r − 1/2) / (1/2).
        ("maxrl", [1, 1, 1, -1]),
        # Lengths 3 and 1: baseline (3·1 + 1·0) / 4 = 3/4.
        ("opo", [0.25, 0.25, 0.25, -0.75]),
        # Two rollouts, one with a reward: α = 2, twice ±1/2.
        ("gpg", [1, 1, 1, -1]),
        # The best is ahead by 1, over 1/sqrt 2.
        ("pass_at_k", [2**0.5] * 3 + [0]),
        # Whitening is over the four tokens: ±1/2 with mean 1/4, squares 3·(1/4)² + (3/4)² = 3/4,
        # unbiased variance 1/4.
        ("reinforce_plus_plus_baseline", [0.5, 0.5, 0.5, -1.5]),
        ("reinforce_plus_plus", [0.5, 0.5, 0.5, -1.5]),
        # Each segment has its rollout's reward at its own end.
        ("reinforce", [1, 1, 1, 0]),
    ],
)
def test_siblings_count_once(name, expected):
    assert advantages(name, [1, 1, 1, 0], **SIBLINGS) == near(*expected)


def test_grpo_on_rewards_one_two_three_six():
    """Mean 3; squares 4 + 1 + 0 + 9 = 14: deviation sqrt(14/3) unbiased, sqrt(14/4) biased."""
    centred = np.array([-2.0, -1.0, 0.0, 3.0])
    rewards = [1, 2, 3, 6]
    assert advantages("grpo", rewards) == near(*(centred / (14 / 3) ** 0.5))
    assert advantages("grpo", rewards, advantage_deviation="biased") == near(*(centred / 3.5**0.5))
    assert advantages("grpo", rewards, advantage_epsilon=0.5) == near(
        *(centred / ((14 / 3) ** 0.5 + 0.5))
    )
    assert advantages("grpo", rewards, grpo_std_normalization=False) == near(*centred)


def test_grpo_leaving_one_out():
    """Of the 6 the others are 1, 2, 3: mean 2, deviation 1. Of the 1: 2, 3, 6, mean 11/3,
    squares 25/9 + 4/9 + 49/9 = 78/9, deviation sqrt(39/9)."""
    got = advantages("grpo", [1, 2, 3, 6], use_leave_one_out_baseline=True)
    assert got[3] == pytest.approx(4, abs=1e-5)
    assert got[0] == pytest.approx(-(8 / 3) / (39 / 9) ** 0.5, abs=1e-5)
    plain = advantages(
        "grpo", [1, 2, 3, 6], use_leave_one_out_baseline=True, grpo_std_normalization=False
    )
    assert plain == near(*(np.array([-2, -1, 0, 3]) * 4 / 3))


def test_grpo_leaving_one_out_divides_by_no_deviation_of_nothing():
    """The 1 stands against three zeros: 1 as it is. A 0 stands against 1, 0, 0: mean 1/3, squares
    4/9 + 1/9 + 1/9 = 2/3, deviation sqrt(1/3). With two rollouts the others are one: no division.
    """
    said = {"use_leave_one_out_baseline": True}
    assert advantages("grpo", [1, 0, 0, 0], **said) == near(1, *[-(3**0.5) / 3] * 3)
    assert advantages("grpo", [1, 0], **said) == near(1, -1)


def test_grpo_by_the_deviation_of_the_batch():
    """Groups 1, 0 and 3, 0: all four have mean 1 and squares 0 + 1 + 4 + 1 = 6, so sqrt 2."""
    got = advantages("grpo", [1, 0, 3, 0], groups=[0, 0, 1, 1], grpo_std_scope="batch")
    assert got == near(*(np.array([0.5, -0.5, 1.5, -1.5]) / 2**0.5))


def test_group_norm_has_its_own_epsilon():
    """Rewards 1e-6 apart: deviation 1e-6/sqrt 2 beside 1e-6 in grpo, and beside 1e-9."""
    rewards = [1e-6, 0.0]
    sigma = 1e-6 / 2**0.5
    assert advantages("grpo", rewards)[0] == pytest.approx(0.5e-6 / (sigma + 1e-6), rel=1e-5)
    assert advantages("group_norm", rewards)[0] == pytest.approx(0.5e-6 / (sigma + 1e-9), rel=1e-5)


def test_maxrl():
    """One success in four, μ = 1/4: (N − K)/K = 3 for it, −1 for the others. None: all 0."""
    assert advantages("maxrl", [1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1], abs=2e-5)
    assert advantages("maxrl", [0, 0, 0]).tolist() == [0, 0, 0]
    with pytest.raises(InvalidArgument, match=r"maxrl\n.*not negative"):
        advantages("maxrl", [1, -1])


def test_opo_weighs_by_length():
    """Lengths 1 and 3, one token of the second masked: (1·1 + 2·0.25) / 3 = 0.5."""
    got = advantages("opo", [1, 0.25], lengths=[1, 3], mask=[1, 1, 0, 1])
    assert got == near(0.5, -0.25, 0, -0.25)


def test_gpg_scales_by_rollouts_with_a_reward():
    """Four rollouts, two with a reward: α = 2. Group means 1/2 and 3/2."""
    got = advantages("gpg", [1, 0, 3, 0], groups=[0, 0, 1, 1])
    assert got == near(1, -1, 3, -3)
    assert advantages("gpg", [0, 0]).tolist() == [0, 0]


def test_pass_at_k():
    """Rewards 1, 3, 6, 2: the 6 is ahead by 3; mean 3, squares 4 + 0 + 9 + 1, sqrt(14/3)."""
    assert advantages("pass_at_k", [1, 3, 6, 2]) == near(0, 0, 3 / (14 / 3) ** 0.5, 0)
    plain = advantages("pass_at_k", [1, 3, 6, 2], grpo_std_normalization=False)
    assert plain.tolist() == [0, 0, 3, 0]
    assert advantages("pass_at_k", [6, 6, 1]).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("grpo", 3 / (1 + 1e-6)),
        ("dr_grpo", 3),
        ("rloo", 3),
        ("group_norm", 3),
        ("maxrl", 3),
        ("opo", 3),
        ("gpg", 3),
        ("pass_at_k", 0),
    ],
)
def test_a_rollout_that_is_alone(name, alone):
    """verl: mean 0 and deviation 1, so its reward; ours by default: 0. No NaN either way."""
    assert advantages(name, [3]).tolist() == [0]
    assert advantages(name, [3], single_sample_advantage="reward") == near(alone)


TWO = {"lengths": [3, 2], "mask": [1, 0, 1, 1, 1]}
"""Sample 0: two loss tokens around an observation. Sample 1: two loss tokens."""


def test_reinforce_returns():
    """γ = 1/2; reward 4 at the last token, one loss token before it: 2. With time passing over the
    observation, too: 1."""
    got = full("reinforce", [4, 2], gamma=0.5, **TWO)
    assert got.advantages_N.tolist() == [2, 0, 4, 1, 2]
    assert got.returns_N.tolist() == [2, 0, 4, 1, 2]
    assert advantages("reinforce", [4, 2], gamma=0.5, discount_masked_tokens=True, **TWO) == near(
        1, 0, 4, 1, 2
    )


def test_reinforce_takes_the_kl_token_by_token():
    """kl_coef 1/2, kl 1, –, 2 | 4, 0: r = −½, 3 | −2, 2. γ = 1/2: 1, 3 | −1, 2."""
    got = advantages("reinforce", [4, 2], gamma=0.5, kl_coef=0.5, kl=[1, np.nan, 2, 4, 0], **TWO)
    assert got.tolist() == [1, 0, 3, -1, 2]


def test_reinforce_plus_plus_whitens_returns():
    """Returns 1, 3 | −1, 2 as above, less their mean 5/4: squares 1 + 49 + 81 + 9 over 16, by 3."""
    said = {"gamma": 0.5, "kl_coef": 0.5, "kl": [1, np.nan, 2, 4, 0], **TWO}
    got = full("reinforce_plus_plus", [4, 2], **said)
    sigma = (140 / 16 / 3) ** 0.5
    assert got.advantages_N == near(-0.25 / sigma, 0, 1.75 / sigma, -2.25 / sigma, 0.75 / sigma)
    assert got.returns_N.tolist() == [1, 0, 3, -1, 2]
    unwhitened = full("reinforce_plus_plus", [4, 2], estimator_whitening=False, **said)
    assert unwhitened.advantages_N.tolist() == [1, 0, 3, -1, 2]


def test_reinforce_plus_plus_with_a_sample_that_is_masked_throughout():
    """It has no last loss token, where slime fails. The others: returns 1 and 0, mean 1/2,
    variance 1/2."""
    got = full("reinforce_plus_plus", [5, 1, 0], lengths=[2, 1, 1], mask=[0, 0, 1, 1])
    assert got.advantages_N == near(0, 0, 2**-0.5, -(2**-0.5))
    assert got.returns_N.tolist() == [0, 0, 1, 0]


def test_reinforce_plus_plus_baseline_has_the_kl_of_each_token():
    """r − μ = ±1, less ½·kl: 0.5, 0 | −3, −1. Mean −7/8."""
    said = {"kl_coef": 0.5, "kl": [1, np.nan, 2, 4, 0], **TWO}
    raw = advantages("reinforce_plus_plus_baseline", [4, 2], estimator_whitening=False, **said)
    assert raw.tolist() == [0.5, 0, 0, -3, -1]
    centred = np.array([11, 7, -17, -1]) / 8
    white = centred / ((centred**2).sum() / 3) ** 0.5
    got = advantages("reinforce_plus_plus_baseline", [4, 2], **said)
    assert got == near(white[0], 0, *white[1:])


def test_remax_subtracts_the_greedy_reward():
    """Whatever γ says: 4 − 1 and 2 − 3."""
    assert advantages("remax", [4, 2], greedy=[1, 3], gamma=0.5, **TWO) == near(3, 0, 3, -1, -1)


def test_remax_finds_the_greedy_reward_among_the_parts():
    said = {"parts": {"greedy_reward": [1, 3], "other": [0, 0]}}
    assert advantages("remax", [4, 2], **said) == near(3, -1)
    assert advantages("remax", [4, 2], remax_baseline_key="other", **said) == near(4, 2)
    with pytest.raises(InvalidArgument, match=r"(?s)'greedy_reward'.*no parts"):
        advantages("remax", [4, 2])
    with pytest.raises(InvalidArgument, match=r"(?s)'greedy_reward'.*nan for sample 1"):
        advantages("remax", [4, 2], parts={"greedy_reward": [1, np.nan]})


def test_ppo():
    """γ = 1/2, λ = 1/2, values 2, –, 4 | 1, 0; rewards 4 and 2 at the ends.

    δ of sample 0: last 4 − 4 = 0, first 0 + ½·4 − 2 = 0; A = 0, 0, returns 2, 4.
    δ of sample 1: last 2 − 0 = 2, first 0 + ½·0 − 1 = −1; A = −1 + ¼·2 = −½, 2; returns ½, 2.
    """
    got = full("ppo", [4, 2], gamma=0.5, lambd=0.5, values=[2, np.nan, 4, 1, 0], **TWO)
    assert got.advantages_N.tolist() == [0, 0, 0, -0.5, 2]
    assert got.returns_N.tolist() == [2, 0, 4, 0.5, 2]


def test_ppo_over_observations():
    """The same with value 6 of the observation, which counts as a step: δ of sample 0 are
    ½·6 − 2 = 1, ½·4 − 6 = −4, 0; A = 1 + ¼·(−4) = 0 and 0."""
    said = {"gamma": 0.5, "lambd": 0.5, "discount_masked_tokens": True, **TWO}
    got = full("ppo", [4, 2], values=[2, 6, 4, 1, 0], **said)
    assert got.advantages_N.tolist() == [0, 0, 0, -0.5, 2]
    got = full("ppo", [4, 2], values=[2, 7, 4, 1, 0], **said)
    # ½·7 − 2 = 1.5, ½·4 − 7 = −5: 1.5 − 1.25.
    assert got.advantages_N.tolist() == [0.25, 0, 0, -0.5, 2]


def test_ppo_with_lambda_and_gamma_1_is_the_return_less_the_value():
    values = [0.5, 0, 2, -1, 3]
    got = full("ppo", [4, 2], values=values, kl_coef=0.5, kl=[1, 0, 2, 4, 0], **TWO)
    # Rewards −½, 3 | −2, 2.
    assert got.returns_N.tolist() == [2.5, 0, 3, 0, 2]
    assert got.advantages_N.tolist() == [2, 0, 1, 1, -1]


def test_ppo_is_whitened_when_asked():
    """A = 0, 0, −½, 2: mean 3/8; its returns stay."""
    said = {"gamma": 0.5, "lambd": 0.5, "values": [2, np.nan, 4, 1, 0], **TWO}
    centred = np.array([-3, -3, -7, 13]) / 8
    white = centred / ((centred**2).sum() / 3) ** 0.5
    got = full("ppo", [4, 2], normalize_advantages=True, **said)
    assert got.advantages_N == near(white[0], 0, *white[1:])
    assert got.returns_N.tolist() == [2, 0, 4, 0.5, 2]


PARTS = {"parts": {"a": [1, 0, 1, 0], "b": [0, 0, 0, 9]}}


def test_gdpo_normalises_each_part_and_then_the_sum():
    """One group. a: 1, 0, 1, 0: ±½ over sqrt(1/3). b: −9/4 thrice, 27/4 over 9/2: −½ and 3/2."""
    a = np.array([0.5, -0.5, 0.5, -0.5]) * 3**0.5
    b = np.array([-0.5, -0.5, -0.5, 1.5])
    plain = advantages("gdpo", [9] * 4, estimator_whitening=False, **PARTS)
    assert plain == near(*(a + b))
    white = (a + b) / (((a + b) ** 2).sum() / 3) ** 0.5
    assert advantages("gdpo", [9] * 4, **PARTS) == near(*white)
    weighted = advantages(
        "gdpo",
        [9] * 4,
        estimator_whitening=False,
        gdpo_reward_keys=("b", "a"),
        gdpo_reward_weights=(2, 0.5),
        **PARTS,
    )
    assert weighted == near(*(2 * b + 0.5 * a))
    only = advantages("gdpo", [9] * 4, estimator_whitening=False, gdpo_reward_keys=("b",), **PARTS)
    assert only == near(*b)


def test_gdpo_whitens_over_rollouts_or_over_tokens():
    """One part, 1 and 0 without deviation: ±½. Rollouts: variance ½. Tokens ½, ½, ½, −½: mean ¼,
    squares 3/16 + 9/16, variance ¼."""
    said = {"parts": {"a": [1, 0]}, "lengths": [3, 1], "grpo_std_normalization": False}
    assert advantages("gdpo", [0, 0], **said) == near(*[2**-0.5] * 3, -(2**-0.5))
    assert advantages("gdpo", [0, 0], gdpo_whitening="token", **said) == near(0.5, 0.5, 0.5, -1.5)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "rewards with parts"),
        ({"parts": {"a": [1, 0]}, "gdpo_reward_keys": ("c",)}, "(?s)'c'.*a"),
        ({"parts": {"a": [1, np.nan]}}, "(?s)'a'.*nan for sample 1 of the batch, rollout_id 1"),
        ({"parts": {"a": [1, 0]}, "rollouts": [5, 5]}, "(?s)rollout_id 5.*reward part 'a'"),
    ],
)
def test_gdpo_without_the_parts_it_needs(said, message):
    with pytest.raises(InvalidArgument, match=message):
        advantages("gdpo", [1, 1], **said)


TEACHER = {"teacher": [-1, -np.inf, -0.5], "log_probs": [-2, -np.inf, -0.25], "mask": [1, 0, 1]}


def test_distillation():
    """Teacher less policy: 1 and −1/4, of one sample with a masked token between."""
    said = {"lengths": [3], **TEACHER}
    assert advantages("on_policy_distillation", [9], **said).tolist() == [1, 0, -0.25]
    assert advantages("on_policy_distillation", [9], opd_kl_coef=0.5, **said).tolist() == [
        0.5,
        0,
        -0.125,
    ]
    with pytest.raises(InvalidArgument, match="teacher"):
        advantages("on_policy_distillation", [9], lengths=[3])


def test_distillation_beside_another_estimator():
    """dr_grpo gives 1 and −1; coefficient 2 adds 2·1 and 2·(−1/4)."""
    said = {"lengths": [2, 1], "use_opd": True, "opd_kl_coef": 2.0, **TEACHER}
    assert advantages("dr_grpo", [3, 1], **said).tolist() == [3, 0, -1.5]


def test_kl_lowers_the_reward_of_a_whole_rollout():
    """Segments of rollout 7 have kl 1 and 2: reward 4 − ½·3; rollout 9 none: 2. Mean 2.25."""
    said = {"rollouts": [7, 7, 9], "kl": [1, 2, 0], "kl_coef": 0.5}
    assert advantages("dr_grpo", [4, 4, 2], **said).tolist() == [0.25, 0.25, -0.25]


def test_a_critic_that_is_not_there_is_asked_for():
    with pytest.raises(InvalidArgument, match=r"ppo\n.*critic"):
        advantages("ppo", [1])


def with_returns(batch, settings):
    """A custom estimator that returns both; the critic's part is masked like the advantages."""
    ones_N = np.ones(len(batch.loss_mask_N), np.float32)
    return Estimate(advantages_N=ones_N, returns_N=2 * ones_N)


def with_bad_returns(batch, settings):
    return Estimate(
        advantages_N=np.zeros(len(batch.loss_mask_N), np.float32), returns_N=np.zeros(1, np.float32)
    )


def test_a_custom_estimator_with_returns():
    settings = AlgorithmSettings(advantage_estimator=f"{__name__}:with_returns")
    got = estimate(batch([1], lengths=[2], mask=[1, 0]), settings)
    assert got.advantages_N.tolist() == [1, 0]
    assert got.returns_N.tolist() == [2, 0]
    bad = AlgorithmSettings(advantage_estimator=f"{__name__}:with_bad_returns")
    with pytest.raises(InvalidArgument, match=r"returns: .*shape \(2,\)"):
        estimate(batch([1], lengths=[2]), bad)
