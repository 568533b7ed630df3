"""A step over packed micro-batches: what the padded one gives, and again bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ledger.errors import Diverged
from tests.trainer.test_step import (
    ALGORITHM,
    NUMBERS,
    SIZES,
    content,
    make_batch,
    plan_of,
    routed_batch,
    sample_tokens,
)
from tests.trainer.tiny_policy import make_folder, make_state
from trainer.batch import Batch
from trainer.microbatch import Partition, recorded_partition
from trainer.partition import PartitionTerms, partition_for
from trainer.scoring import score_policy
from trainer.step import StepResult, run_step
from trainer.step_check import require_finite

PACKED = dataclasses.replace(SIZES, use_dynamic_batch_size=True, max_tokens_per_gpu=12)
LENGTHS = np.array([len(row) for row in sample_tokens()])


def plan(**terms: int) -> Partition:
    return partition_for(LENGTHS, np.arange(4), PACKED, PartitionTerms(**terms))


def step(state, batch, plan, sizes=PACKED, **other) -> StepResult:
    return run_step(state, batch, plan, ALGORITHM, sizes, **(NUMBERS | other))


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp(request.param), moe=request.param == "moe")


def batch_of(folder, order=range(4)) -> Batch:
    if "moe" in folder.name:
        return routed_batch(folder, order=order)
    return make_batch(state=make_state(folder), order=order)


def by_index(batch: Batch, values_N: np.ndarray) -> np.ndarray:
    """The values in the order of samples, whatever the training order was."""
    parts = np.split(values_N, batch.offsets_N[1:-1])
    return np.concatenate([parts[place] for place in np.argsort(batch.indices_B)])


def test_the_partition_is_what_the_step_records(folder):
    made = plan(width_multiple=4)
    batch = batch_of(folder, made.order_B)
    committed = step(make_state(folder), batch, made).step_committed
    assert committed.indices.tolist() == made.order_B.tolist()
    assert committed.micro_batch_widths.tolist() == [12, 12]
    assert committed.micro_batch_rows == 1
    again = recorded_partition(committed)
    assert again.packed
    for name in ("offsets_M", "ranks_M", "widths_M"):
        assert getattr(again, name).tolist() == getattr(made, name).tolist()


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_packed_step_is_the_padded_one(folder, multiple):
    """Log-probs within 1e-6, gradients within 1e-5 of the largest: float32 sums over tokens in
    another order, and of experts over other neighbours."""
    padded_batch = batch_of(folder)
    padded_state = make_state(folder, clip_grad=0.0)
    padded = step(padded_state, padded_batch, plan_of(padded_batch, SIZES), SIZES)
    made = plan(width_multiple=multiple)
    batch = batch_of(folder, made.order_B)
    state = make_state(folder, clip_grad=0.0)
    packed = step(state, batch, made)
    assert packed.step_committed.loss == pytest.approx(padded.step_committed.loss, abs=1e-7)
    for name, value in padded.metrics.items():
        assert packed.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    found, expected = (
        by_index(b, np.concatenate([s.log_probs for s in result.signals]))
        for b, result in ((batch, packed), (padded_batch, padded))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    gradients = dict(padded_state.model.named_parameters())
    for name, parameter in state.model.named_parameters():
        tolerance = 1e-5 * float(gradients[name].main_grad.abs().max())
        torch.testing.assert_close(
            parameter.main_grad, gradients[name].main_grad, rtol=0, atol=tolerance, msg=name
        )


def test_twice_from_the_same_state_gives_the_same_bits(folder):
    made = plan()
    batch = batch_of(folder, made.order_B)
    first, second = (step(make_state(folder), batch, made) for _ in range(2))
    assert content(first) == content(second)


def test_the_old_policy_scores_with_the_bits_of_the_training_forward(folder):
    made = plan()
    batch = batch_of(folder, made.order_B)
    state = make_state(folder)
    scored = score_policy(state, batch, made)
    trained = step(state, batch, made)
    recorded = np.concatenate([signal.log_probs for signal in trained.signals])
    assert scored.tobytes() == recorded.tobytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_named_before_the_optimizer_runs(folder, value) -> None:
    state = make_state(folder)
    batch = batch_of(folder)
    fine = np.zeros(2)
    require_finite(state, batch, plan(), fine, "the policy")
    name, parameter = next(iter(state.model.named_parameters()))
    parameter.main_grad.view(-1)[-1] = value
    with pytest.raises(Diverged, match=f"'{name}', rank 0"):
        require_finite(state, batch, plan(), fine, "the policy")
