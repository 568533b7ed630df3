"""Compares a step with the same step run again, bit by bit, and names the first difference."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ledger.events import SignalRecorded, StepCommitted, WeightsPublished
from ledger.weights import TensorRecord, first_difference

__all__ = ["Divergence", "compare_signals", "compare_steps", "records_of_event"]

_SIGNALS = (
    "loss_mask",
    "log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
    "correction_weights",
)
"""In the order in which they are computed: each may follow from those before it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a step that was run again first gave something else."""

    step: int
    weight_version: int
    """The version that the step made."""
    quantity: str
    """'settings', 'batch', 'micro-batches', 'log-probs', 'loss', 'gradients', 'grad norm',
    'learning rate', 'metrics', 'weights', 'optimizer', 'random state', 'critic gradients',
    'critic weights' or 'critic optimizer'; of signals 'signals' (of
    other samples), 'settings_id', 'loss_mask', 'log_probs', 'ref_log_probs',
    'teacher_log_probs', 'values', 'advantages', 'returns' or 'correction_weights'."""
    where: str
    """The micro-batch, metric, tensor or sample; empty where the quantity has no parts."""
    expected: str
    """As recorded."""
    found: str
    """As computed again."""

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return (
            f"step {self.step} (version {self.weight_version}): {self.quantity}{place}: "
            f"recorded {self.expected}, again {self.found}"
        )


def compare_steps(
    recorded: StepCommitted,
    again: StepCommitted,
    recorded_weights: WeightsPublished,
    again_weights: WeightsPublished,
) -> Divergence | None:
    """The first difference, in the order in which a step computes; None where all bits agree.

    The order: settings, batch, partition into micro-batches, log-probs (which micro-batch), loss,
    gradients, their norm, learning rate, metrics (which one), weights (which tensor), optimizer,
    random state, the critic's gradients, weights and optimizer. Floats are compared by their bits:
    NaN equals itself, and −0.0 is not 0.0. Measurements do not count.
    """

    def diverged(quantity: str, expected: object, found: object, where: str = "") -> Divergence:
        return Divergence(
            step=recorded.step,
            weight_version=recorded.weight_version_out,
            quantity=quantity,
            where=where,
            expected=_text(expected),
            found=_text(found),
        )

    if recorded.settings_id != again.settings_id:
        return diverged("settings", recorded.settings, again.settings)
    if not np.array_equal(recorded.indices, again.indices):
        return diverged("batch", recorded.indices.tolist(), again.indices.tolist(), "samples")
    if recorded.batch_digest != again.batch_digest:
        return diverged("batch", recorded.batch_digest, again.batch_digest)
    shapes = [
        (
            s.micro_batch_offsets.tolist(),
            s.micro_batch_ranks.tolist(),
            s.micro_batch_rows,
            s.micro_batch_width,
            None if s.micro_batch_widths is None else s.micro_batch_widths.tolist(),
        )
        for s in (recorded, again)
    ]
    if shapes[0] != shapes[1]:
        was, now = shapes
        return diverged("micro-batches", was, now, "offsets, ranks, rows, width, widths")
    for number, (a, b) in enumerate(
        zip(recorded.micro_batch_digests, again.micro_batch_digests, strict=True)
    ):
        if a != b:
            return diverged("log-probs", a, b, f"micro-batch {number}")
    if _bits(recorded.loss) != _bits(again.loss):
        return diverged("loss", recorded.loss, again.loss)
    if recorded.gradient_digest != again.gradient_digest:
        return diverged("gradients", recorded.gradient_digest, again.gradient_digest)
    for quantity, expected, found in (
        ("grad norm", recorded.grad_norm, again.grad_norm),
        ("learning rate", recorded.learning_rate, again.learning_rate),
    ):
        if _bits(expected) != _bits(found):
            return diverged(quantity, expected, found)
    if len(recorded.metric_values) != len(recorded.metric_names) or len(again.metric_values) != len(
        again.metric_names
    ):
        return diverged(
            "metrics", len(recorded.metric_values), len(again.metric_values), "number of values"
        )
    # A later version may measure more; what was recorded has to come out again.
    measured = dict(zip(again.metric_names, again.metric_values.tolist(), strict=True))
    if [name for name in again.metric_names if name in set(recorded.metric_names)] != list(
        recorded.metric_names
    ):
        return diverged("metrics", recorded.metric_names, again.metric_names, "names")
    for name, was in zip(recorded.metric_names, recorded.metric_values.tolist(), strict=True):
        if _bits(was) != _bits(measured[name]):
            return diverged("metrics", was, measured[name], name)
    tensor = first_difference(records_of_event(recorded_weights), records_of_event(again_weights))
    if tensor is not None or recorded_weights.root != again_weights.root:
        return diverged("weights", recorded_weights.root, again_weights.root, tensor or "root")
    if recorded.optimizer_digest != again.optimizer_digest:
        return diverged("optimizer", recorded.optimizer_digest, again.optimizer_digest)
    if recorded.random_state_digest != again.random_state_digest:
        return diverged("random state", recorded.random_state_digest, again.random_state_digest)
    for quantity, name in (
        ("critic gradients", "critic_gradient_digest"),
        ("critic weights", "critic_root"),
        ("critic optimizer", "critic_optimizer_digest"),
    ):
        if getattr(recorded, name) != getattr(again, name):
            return diverged(quantity, getattr(recorded, name), getattr(again, name))
    return None


def compare_signals(
    recorded: Sequence[SignalRecorded],
    again: Sequence[SignalRecorded],
    *,
    step: int,
    weight_version: int,
) -> Divergence | None:
    """The first difference between the signals of a step; None where all bits agree.

    Samples are matched by index, in whatever order they come. First the settings of all samples are
    compared, then the loss mask of all, log-probs, those of reference and teacher, values,
    advantages, returns and correction weights, so that a cause is named before what follows from
    it; within a quantity the first sample in the order of `recorded`, and in it the first position
    [R] that differs. Floats are compared by their bits. `step` and `weight_version` (the version it
    made) are what is reported.
    """

    def diverged(quantity: str, expected: object, found: object, where: str) -> Divergence:
        return Divergence(step, weight_version, quantity, where, _text(expected), _text(found))

    was_of, now_of = ({s.index: s for s in signals} for signals in (recorded, again))
    if len(was_of) != len(recorded) or len(now_of) != len(again) or was_of.keys() != now_of.keys():
        was, now = (sorted(s.index for s in signals) for signals in (recorded, again))
        return diverged("signals", was, now, "samples")
    for index, signal in was_of.items():
        other = now_of[index]
        if signal.settings_id != other.settings_id:
            return diverged("settings_id", signal.settings_id, other.settings_id, f"sample {index}")
    for quantity in _SIGNALS:
        for index, signal in was_of.items():
            values_R = getattr(signal, quantity), getattr(now_of[index], quantity)
            difference = _first_position(*values_R)
            if difference is not None:
                place, expected, found = difference
                return diverged(quantity, expected, found, f"sample {index}, {place}")
    return None


def _first_position(
    was_R: np.ndarray | None, now_R: np.ndarray | None
) -> tuple[str, object, object] | None:
    """The first position at which two arrays [R] have other bits, with both values."""
    if was_R is None or now_R is None:
        if was_R is now_R:
            return None
        was, now = ("none" if a is None else f"{len(a)} values" for a in (was_R, now_R))
        return "all positions", was, now
    if was_R.dtype != now_R.dtype or was_R.shape != now_R.shape:
        return (
            "dtype and length",
            f"{was_R.dtype} [{len(was_R)}]",
            f"{now_R.dtype} [{len(now_R)}]",
        )
    bits = np.dtype(f"u{was_R.dtype.itemsize}")
    differing = np.flatnonzero(
        np.ascontiguousarray(was_R).view(bits) != np.ascontiguousarray(now_R).view(bits)
    )
    if not len(differing):
        return None
    at = int(differing[0])
    return f"position {at}", _element(was_R, at), _element(now_R, at)


def _element(values_R: np.ndarray, at: int) -> str:
    """One value, with the bits of a float: two NaNs can differ in nothing else."""
    value = values_R[at]
    if values_R.dtype.kind != "f":
        return str(value)
    return f"{value!s} (bits 0x{value.tobytes()[::-1].hex()})"


def records_of_event(event: WeightsPublished) -> list[TensorRecord]:
    """The record of each tensor that a publication names."""
    return [
        TensorRecord(name=name, dtype=dtype, shape=tuple(int(n) for n in shape), checksum=checksum)
        for name, dtype, shape, checksum in zip(
            event.tensor_names,
            event.tensor_dtypes,
            event.tensor_shapes,
            event.tensor_checksums,
            strict=True,
        )
    ]


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _text(value: object) -> str:
    """Digests in hexadecimal, floats so that other bits are another text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value!r} ({value.hex()}, bits 0x{struct.pack('>d', value).hex()})"
    return str(value)
