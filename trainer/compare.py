"""Compares a step with the same step run again, bit by bit, and names the first difference."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ledger.events import StepCommitted, WeightsPublished
from ledger.weights import TensorRecord, first_difference

__all__ = ["Divergence", "compare_steps", "records_of_event"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a step that was run again first gave something else."""

    step: int
    weight_version: int
    """The version that the step made."""
    quantity: str
    """'settings', 'batch', 'micro-batches', 'log-probs', 'loss', 'gradients', 'grad norm',
    'learning rate', 'weights', 'optimizer' or 'random state'."""
    where: str
    """The micro-batch or tensor; empty where the quantity has no parts."""
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
    gradients, their norm, learning rate, weights (which tensor), optimizer, random state. Floats
    are compared by their bits: NaN equals itself, and −0.0 is not 0.0. Measurements do not count.
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
        )
        for s in (recorded, again)
    ]
    if shapes[0] != shapes[1]:
        return diverged("micro-batches", shapes[0], shapes[1], "offsets, ranks, rows, width")
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
    tensor = first_difference(records_of_event(recorded_weights), records_of_event(again_weights))
    if tensor is not None or recorded_weights.root != again_weights.root:
        return diverged("weights", recorded_weights.root, again_weights.root, tensor or "root")
    if recorded.optimizer_digest != again.optimizer_digest:
        return diverged("optimizer", recorded.optimizer_digest, again.optimizer_digest)
    if recorded.random_state_digest != again.random_state_digest:
        return diverged("random state", recorded.random_state_digest, again.random_state_digest)
    return None


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
        return f"{value!r} ({value.hex()})"
    return str(value)
