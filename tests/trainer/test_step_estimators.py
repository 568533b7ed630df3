"""Estimators in a training step: what it is given reaches them, and what they say is recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from tests.trainer import reference_advantages as loops
from tests.trainer.test_step import make_batch, step
from tests.trainer.tiny_policy import make_folder
from trainer.settings import AlgorithmSettings

REWARDS = (1.0, 0.25, 0.0, 2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("dense"))


def story_of(batch):
    """The batch as the loops of the second implementation like to see it."""
    return [
        loops.Sample(
            rollout=int(batch.rollout_id_B[b]),
            group=int(batch.group_index_B[b]),
            reward=float(batch.rewards_B[b]),
            tokens=[loops.Token(int(m)) for m in batch.loss_mask_N[slice(*span)]],
        )
        for b, span in enumerate(zip(batch.offsets_N[:-1], batch.offsets_N[1:], strict=True))
    ]


@pytest.mark.parametrize("name", ["opo", "pass_at_k", "reinforce_plus_plus", "reinforce"])
def test_a_step_records_what_the_second_implementation_says(folder, name):
    """Sample 2 has an observation in the middle."""
    batch = make_batch(REWARDS)
    algorithm = AlgorithmSettings(advantage_estimator=name, gamma=0.5)
    result = step(folder, batch, algorithm)
    expected = loops.advantages(name, story_of(batch), loops.Options(gamma=0.5))
    for signal, wanted in zip(result.signals, expected, strict=True):
        np.testing.assert_allclose(signal.advantages, wanted, rtol=1e-5, atol=1e-5)
    assert result.step_committed.grad_norm > 0


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "gpg"])
def test_what_is_in_a_sample_that_is_masked_throughout_changes_no_gradient(folder, name):
    """Sample 3 is masked: its tokens and its log-probs by the engine might be others."""
    batch = make_batch(REWARDS)
    mask_N, engine_N, tokens_T = (
        array.copy() for array in (batch.loss_mask_N, batch.rollout_log_probs_N, batch.tokens_T)
    )
    mask_N[slice(*batch.offsets_N[3:5])] = 0
    engine_N[slice(*batch.offsets_N[3:5])] = -7
    tokens_T[batch.offsets_T[4] - 1] += 1
    algorithm = AlgorithmSettings(advantage_estimator=name)
    masked = dataclasses.replace(batch, loss_mask_N=mask_N)
    other = dataclasses.replace(masked, rollout_log_probs_N=engine_N, tokens_T=tokens_T)
    first, second = (step(folder, one, algorithm) for one in (masked, other))
    assert first.signals[3].advantages.tolist() == [0.0, 0.0]
    assert np.isfinite(first.step_committed.loss)
    assert first.step_committed.grad_norm > 0
    assert first.step_committed.gradient_digest == second.step_committed.gradient_digest


def test_parts_of_rewards_enter_the_step_of_gdpo_and_its_digest(folder):
    batch = dataclasses.replace(
        make_batch(REWARDS),
        part_names=("ended", "right"),
        reward_parts_BP=np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 5.0], [1.0, 7.0]]),
    )
    changed = dataclasses.replace(
        batch, reward_parts_BP=batch.reward_parts_BP + np.array([0.0, 1.0])
    )
    algorithm = AlgorithmSettings(
        advantage_estimator="gdpo",
        gdpo_reward_keys=("ended", "right"),
        gdpo_reward_weights=(1.0, 2.0),
        grpo_std_normalization=False,
        estimator_whitening=False,
    )
    result = step(folder, batch, algorithm)
    # Of group 0 the parts are centred to ±½ and 0, of group 1 to 0 and ∓1, which weighs 2.
    for signal, wanted in zip(result.signals, [0.5, -0.5, -2.0, 2.0], strict=True):
        assert set(signal.advantages[signal.loss_mask > 0]) == {np.float32(wanted)}

    def digest(batch, algorithm):
        return step(folder, batch, algorithm).step_committed.batch_digest

    ended = dataclasses.replace(algorithm, gdpo_reward_keys=("ended",), gdpo_reward_weights=(1.0,))
    assert result.step_committed.batch_digest != digest(changed, algorithm)
    assert digest(batch, ended) == digest(changed, ended)
    assert digest(batch, AlgorithmSettings()) == digest(make_batch(REWARDS), AlgorithmSettings())


def test_remax_takes_the_greedy_reward_from_the_parts(folder):
    algorithm = AlgorithmSettings(advantage_estimator="remax")
    with pytest.raises(InvalidArgument, match="'greedy_reward'"):
        step(folder, make_batch(REWARDS), algorithm)
    batch = dataclasses.replace(
        make_batch(REWARDS),
        part_names=("greedy_reward",),
        reward_parts_BP=np.array([[0.5], [0.5], [1.0], [1.0]]),
    )
    result = step(folder, batch, algorithm)
    for signal, wanted in zip(result.signals, [0.5, -0.25, -1.0, 1.0], strict=True):
        assert set(signal.advantages[signal.loss_mask > 0]) == {np.float32(wanted)}
