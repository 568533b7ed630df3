"""The events of a step, from what it computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from ledger.events import SignalRecorded, WeightsPublished
from ledger.weights import TensorRecord, weights_root
from trainer.algorithms.correction_metrics import correction_metrics
from trainer.algorithms.metrics import (
    length_metrics,
    mean_where,
    mismatch_metrics,
    ppo_kl,
    reward_metrics,
    spread_metrics,
)
from trainer.batch import Batch
from trainer.micro_step import Outcome, Signals
from trainer.microbatch import Partition
from trainer.settings import AlgorithmSettings
from trainer.whole_step import step_inputs

__all__ = ["micro_batch_digests", "signal_events", "step_metrics", "weights_event"]

_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


def micro_batch_digests(
    batch: Batch, plan: Partition, log_probs_N: npt.NDArray[np.float32]
) -> list[bytes]:
    """blake3 of each micro-batch's current log-probs of sampled tokens: float32, little-endian, in
    the order of its samples.

    In the first step of a rollout they can be computed again from the signals alone, which hold the
    same numbers.
    """
    digests = []
    offsets_N = batch.offsets_N[plan.offsets_M]
    for first, last in zip(offsets_N[:-1].tolist(), offsets_N[1:].tolist(), strict=True):
        sampled = batch.sampled_N[first:last] > 0
        taken = np.ascontiguousarray(log_probs_N[first:last][sampled], np.dtype("<f4"))
        digests.append(blake3(taken.tobytes()).digest())
    return digests


def signal_events(
    batch: Batch,
    signals: Signals,
    trainer_log_probs_N: npt.NDArray[np.float32],
    *,
    correction_weights_N: npt.NDArray[np.float32] | None,
    step: int,
    settings_id: bytes,
) -> list[SignalRecorded]:
    """One event a sample, in training order. Log-probs are NaN where nothing was sampled.

    Correction weights are 0 wherever the loss mask is 0, and None where no correction is on.
    """
    if correction_weights_N is not None:
        correction_weights_N = np.where(batch.loss_mask_N > 0, correction_weights_N, np.float32(0))
    unsampled_N = batch.sampled_N == 0
    log_probs_N = trainer_log_probs_N.copy()
    log_probs_N[unsampled_N] = np.nan

    def of_sampled(values_N: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
        return None if values_N is None else np.where(unsampled_N, np.float32(np.nan), values_N)

    by_name = {
        "ref_log_probs": of_sampled(signals.ref_log_probs_N),
        "teacher_log_probs": of_sampled(signals.teacher_log_probs_N),
        "values": signals.values_N,
        "returns": signals.returns_N,
        "correction_weights": correction_weights_N,
    }
    there = {name: values_N for name, values_N in by_name.items() if values_N is not None}
    offsets = batch.offsets_N
    return [
        SignalRecorded(
            index=int(index),
            step=step,
            settings_id=settings_id,
            loss_mask=batch.loss_mask_N[first:last],
            log_probs=log_probs_N[first:last],
            advantages=signals.advantages_N[first:last],
            **{name: values_N[first:last] for name, values_N in there.items()},
        )
        for index, first, last in zip(batch.indices_B, offsets[:-1], offsets[1:], strict=True)
    ]


def weights_event(
    records: Sequence[TensorRecord],
    *,
    weight_version: int,
    parent_version: int | None,
    step: int | None,
) -> WeightsPublished:
    """The publication of a version, before anything transported it."""
    ordered = sorted(records, key=lambda record: record.name)
    return WeightsPublished(
        weight_version=weight_version,
        parent_version=parent_version,
        step=step,
        tensor_names=[r.name for r in ordered],
        tensor_dtypes=[r.dtype for r in ordered],
        tensor_shapes=[np.array(r.shape, np.int64) for r in ordered],
        tensor_checksums=[r.checksum for r in ordered],
        root=weights_root(ordered),
        size_bytes=sum(int(np.prod(r.shape)) * _SIZES[r.dtype] for r in ordered),
        transport="none",
        acknowledged_by=[],
    )


def step_metrics(
    batch: Batch,
    signals: Signals,
    outcome: Outcome,
    algorithm: AlgorithmSettings,
    trainer_log_probs_N: npt.NDArray[np.float32],
    *,
    grad_norm: float,
    learning_rate: float,
) -> dict[str, float]:
    """All metrics of a step by name. `trainer_log_probs_N`: by the trainer's old policy.

    Means over tokens take those with loss mask 1; the mismatch takes all sampled tokens.
    """
    mask_N = batch.loss_mask_N
    low, high = (
        mean_where(outcome.clipped_low_N, mask_N),
        mean_where(outcome.clipped_high_N, mask_N),
    )
    metrics = {
        "loss": outcome.loss,
        "policy_loss": float(
            # Not np.dot: its bits depend on how many threads the BLAS takes.
            np.sum(signals.weights_N * np.where(mask_N > 0, outcome.policy_loss_N, 0))
        ),
        "entropy": mean_where(outcome.entropy_N, mask_N),
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
    }
    if signals.ref_log_probs_N is not None:
        metrics["ref_kl"] = mean_where(outcome.kl_N, mask_N)
    old_N = signals.old_log_probs_N
    old_N = outcome.log_probs_N if old_N is None else old_N
    metrics["ppo_kl"] = ppo_kl(outcome.log_probs_N, old_N, mask_N)
    if algorithm.use_tis or algorithm.use_opsm:
        inputs = step_inputs(batch, signals.advantages_N, outcome.log_probs_N, old_N)
        weights_N = torch.from_numpy(outcome.correction_weights_N)
        metrics |= correction_metrics(inputs, algorithm, weights_N)
    metrics |= mismatch_metrics(trainer_log_probs_N, batch.rollout_log_probs_N, batch.sampled_N)
    metrics |= spread_metrics("advantage", signals.advantages_N, mask_N)
    metrics |= reward_metrics(
        batch.rewards_B, batch.raw_rewards_B, batch.group_index_B, batch.rollout_id_B
    )
    return metrics | length_metrics(batch.response_lengths_B, batch.truncated_B)
