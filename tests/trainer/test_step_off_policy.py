"""Steps on tokens of another policy: corrections, masks, and every loss through a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from tests.trainer.memory import MemoryReader, prompt, score, segment
from tests.trainer.test_step import (
    SIZES,
    make_batch,
    make_folder,
    make_state,
    plan_of,
    reference_of,
    step,
)
from trainer.algorithms.losses import POLICY_LOSS_ALIASES, POLICY_LOSSES
from trainer.batch import Batch
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings
from trainer.stepping import PlannedStep, take_rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("dense"))


def flat(result, name) -> np.ndarray:
    return np.concatenate([getattr(signal, name) for signal in result.signals])


def token_weights_of(batch: Batch) -> np.ndarray:
    """Each of four rollouts 1/4, evenly over its loss tokens."""
    mask = batch.loss_mask_N.astype(np.float64)
    tokens = np.add.reduceat(mask, batch.offsets_N[:-1])
    return mask / np.repeat(np.maximum(tokens, 1) * 4, batch.response_lengths_B)


def test_tis_in_a_step(folder):
    """The engine's log-probs are −1 everywhere, the trainer's of a random model near −3.5."""
    batch = make_batch()
    trainer = score_policy(make_state(folder), batch, plan_of(batch, SIZES))
    x = trainer.astype(np.float64) - batch.rollout_log_probs_N
    clip = float(np.nanmedian(np.exp(x)))
    result = step(folder, batch, AlgorithmSettings(use_tis=True, tis_clip=clip))
    expected = np.where(batch.loss_mask_N > 0, np.minimum(np.exp(x), clip), 0)
    weights = flat(result, "correction_weights")
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert weights.dtype == np.float32
    assert result.signals[2].correction_weights[2] == 0  # the tool token
    assert 0 < result.metrics["tis_clipfrac"] < 1
    loss = -np.sum(token_weights_of(batch) * flat(result, "advantages") * expected)
    assert result.step_committed.loss == pytest.approx(loss, rel=1e-4)
    assert result.metrics["policy_loss"] == pytest.approx(loss, rel=1e-4)
    assert result.metrics["correction_weight_mean"] == pytest.approx(
        expected.sum() / batch.loss_mask_N.sum(), rel=1e-5
    )


def test_no_weights_are_recorded_without_a_correction(folder):
    result = step(folder, make_batch())
    assert all(signal.correction_weights is None for signal in result.signals)
    assert not any(name.startswith(("tis", "correction")) for name in result.metrics)
    assert result.metrics["ppo_kl"] == 0.0


def test_rejected_tokens_leave_the_whole_loss(folder):
    """All of them: no gradient is left, of the entropy bonus neither."""
    algorithm = AlgorithmSettings(
        use_tis=True,
        custom_tis_function_path="mis",
        mis_mode="mask",
        mis_lower_bound=100.0,
        mis_upper_bound=101.0,
        entropy_coef=0.1,
    )
    result = step(folder, make_batch(), algorithm)
    assert result.step_committed.loss == 0.0
    assert result.step_committed.grad_norm == 0.0
    assert flat(result, "correction_weights").tolist() == [0.0] * 11
    assert result.metrics["mis_mask_fraction_low"] == 1.0
    kept = step(folder, make_batch(), dataclasses.replace(algorithm, mis_lower_bound=0.0))
    assert kept.step_committed.grad_norm > 0


def test_rejection_leaves_denominators_alone(folder):
    """Sample 0 alone is kept: the loss is its share, 1/4, and no more."""
    batch = make_batch()
    rollout = np.full(len(batch.sampled_N), 50.0, np.float32)
    rollout[:3] = -1.0
    batch = dataclasses.replace(batch, rollout_log_probs_N=rollout)
    algorithm = AlgorithmSettings(
        advantage_estimator="mean_baseline",
        use_tis=True,
        custom_tis_function_path="mis",
        mis_mode="mask",
        mis_lower_bound=1e-6,
        mis_upper_bound=1e6,
    )
    result = step(folder, batch, algorithm)
    weights = flat(result, "correction_weights")
    assert (weights[3:] == 0).all()
    assert result.step_committed.loss == pytest.approx(-0.5 * weights[:3].mean() / 4, rel=1e-5)


MIS_NORMALIZED = AlgorithmSettings(
    use_tis=True,
    custom_tis_function_path="mis",
    mis_mode="clip",
    mis_upper_bound=0.2,
    mis_lower_bound=0.001,
    mis_batch_normalize=True,
)


def test_normalised_weights_need_the_whole_step_first(folder):
    batch = make_batch()
    with pytest.raises(InvalidArgument, match="--mis-batch-normalize"):
        step(folder, batch, MIS_NORMALIZED)
    losses = []
    for rows in (1, 3):
        sizes = dataclasses.replace(SIZES, micro_batch_size=rows)
        state = make_state(folder)
        old = score_policy(state, batch, plan_of(batch, sizes))
        result = step(folder, batch, MIS_NORMALIZED, sizes, state, old_log_probs_N=old)
        weights = flat(result, "correction_weights")[batch.loss_mask_N > 0]
        assert weights.mean() == pytest.approx(1.0, rel=1e-6)
        assert weights.std() > 0.1
        losses.append(result.step_committed.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def old_of(folder, batch: Batch) -> np.ndarray:
    """Log-probs of an old policy: the current one's moved about, so that ratios differ."""
    current = score_policy(make_state(folder), batch, plan_of(batch, SIZES))
    moved = current + np.float32(0.3) * np.sin(np.arange(len(current), dtype=np.float32))
    return np.where(batch.sampled_N > 0, moved, np.float32(np.nan)).astype(np.float32)


def second(folder, batch, algorithm, old, sizes=SIZES):
    return step(folder, batch, algorithm, sizes, step_in_rollout=1, old_log_probs_N=old)


def test_opsm_in_a_later_step(folder):
    batch = make_batch()
    old = old_of(folder, batch)
    result = second(folder, batch, AlgorithmSettings(use_opsm=True, opsm_delta=0.0), old)
    current = score_policy(make_state(folder), batch, plan_of(batch, SIZES))
    for number, signal in enumerate(result.signals):
        part = slice(*batch.offsets_N[number : number + 2])
        mask = batch.loss_mask_N[part] > 0
        far = (old[part] - current[part])[mask].mean() > 0
        dropped = far and (signal.advantages[mask] < 0).all()
        assert signal.correction_weights.tolist() == (mask & (not dropped)).tolist()
    assert 0 < result.metrics["opsm_clipfrac"] < 1
    assert result.metrics["ppo_kl"] == pytest.approx(
        float((old - current)[batch.loss_mask_N > 0].mean()), rel=1e-4
    )


NAMES = sorted(set(POLICY_LOSSES) - set(POLICY_LOSS_ALIASES))


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_with_a_fully_masked_sample(folder, name):
    """The masked sample adds nothing: whatever its old log-probs are, every bit stays."""
    batch = make_batch()
    mask = batch.loss_mask_N.copy()
    mask[batch.offsets_N[2] : batch.offsets_N[3]] = 0
    batch = dataclasses.replace(batch, loss_mask_N=mask)
    old = old_of(folder, batch)
    algorithm = AlgorithmSettings(policy_loss=name, use_tis=True, kl_loss_type="k2")
    first = second(folder, batch, algorithm, old)
    assert np.isfinite(first.step_committed.grad_norm)
    assert first.step_committed.grad_norm > 0
    wild = old.copy()
    wild[batch.offsets_N[2] : batch.offsets_N[3]] = 300.0
    wild[batch.sampled_N == 0] = np.nan
    other = second(folder, batch, algorithm, wild)
    assert other.weights.root == first.weights.root
    assert other.step_committed.loss == first.step_committed.loss


@pytest.mark.parametrize("name", NAMES)
def test_losses_do_not_know_the_partition(folder, name):
    """Those that choose tokens by their covariance choose them from the whole step."""
    batch = make_batch()
    old = old_of(folder, batch)
    algorithm = AlgorithmSettings(
        policy_loss=name,
        loss_aggregation="seq-mean-token-sum",
        clip_cov_lb=0.0,
        clip_cov_ratio=0.3,
        kl_cov_ratio=0.3,
    )
    one, four = (
        second(folder, batch, algorithm, old, dataclasses.replace(SIZES, micro_batch_size=m))
        for m in (1, 4)
    )
    assert one.step_committed.loss == pytest.approx(four.step_committed.loss, rel=1e-5, abs=1e-6)
    assert one.step_committed.grad_norm == pytest.approx(four.step_committed.grad_norm, rel=1e-4)
    if name in ("clip_cov", "kl_cov"):
        assert one.metrics["clip_fraction_high"] == four.metrics["clip_fraction_high"] >= 3 / 10


def test_unbiased_kl_in_a_step(folder, other_model):
    """At ratio 1 the value is the same and the gradient is not."""
    batch = make_batch((0.0, 0.0, 0.0, 0.0))
    biased = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")
    unbiased = dataclasses.replace(biased, use_unbiased_kl=True)
    models = reference_of(other_model)
    plain = step(folder, batch, biased, models=models)
    result = step(folder, batch, unbiased, models=models)
    assert result.step_committed.loss == plain.step_committed.loss
    assert result.step_committed.gradient_digest != plain.step_committed.gradient_digest


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_state(make_folder(tmp_path_factory.mktemp("other"), seed=9)).model


def resumed(index: int) -> list[Any]:
    """10 tokens by version 3, then, resumed, 6 by version 4."""
    return [
        segment(index, range(1, 11), spans=[(0, 10, 3)], finish_reason="abort"),
        segment(index, range(11, 17), start=10, number=1, spans=[(0, 6, 4)]),
    ]


def test_mask_offpolicy_in_partial_rollout(folder):
    """Sample 1 was sampled by version 4 alone."""
    events = [
        prompt([0, 1], [1, 2, 3]),
        *resumed(0),
        segment(1, [7, 8, 9], spans=[(0, 3, 4)]),
        score(0, 1.0),
        score(1, 0.0),
    ]
    sizes = dataclasses.replace(
        SIZES, rollout_batch_size=1, global_batch_size=2, micro_batch_size=2, seq_length=24
    )
    plan = PlannedStep(
        step=0,
        rollout_step=0,
        step_in_rollout=0,
        weight_version_in=4,
        weight_version_out=5,
        indices=np.array([0, 1]),
    )
    masks = {}
    for on in (False, True):
        algorithm = AlgorithmSettings(mask_offpolicy_in_partial_rollout=on)
        ((_, batch, result),) = take_rollout(
            make_state(folder), MemoryReader(events), [plan], algorithm, sizes
        )
        masks[on] = {signal.index: signal.loss_mask.tolist() for signal in result.signals}
        assert batch.weight_versions_N[batch.offsets_N[0] :][:3].min() >= 3
    assert masks[False] == {0: [1] * 16, 1: [1] * 3}
    assert masks[True] == {0: [0] * 10 + [1] * 6, 1: [1] * 3}
    assert result.step_committed.trained_tokens == 9
