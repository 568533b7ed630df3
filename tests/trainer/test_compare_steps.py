"""The first difference between a step and its repetition is named, in the order of computing."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest

from ledger.events import SignalRecorded, StepCommitted, WeightsPublished
from trainer.compare import _SIGNALS, compare_signals, compare_steps

STEP = StepCommitted(
    step=3,
    rollout_step=3,
    step_in_rollout=0,
    weight_version_in=3,
    weight_version_out=4,
    indices=np.array([5, 6]),
    micro_batch_offsets=np.array([0, 1, 2], np.int32),
    micro_batch_ranks=np.array([0, 0], np.int32),
    micro_batch_rows=1,
    micro_batch_width=8,
    settings_id=bytes(32),
    settings="{}",
    layout="{}",
    learning_rate=0.1,
    loss=0.0,
    grad_norm=1.0,
    metric_names=["loss", "ref_kl"],
    metric_values=np.array([0.0, np.nan]),
    batch_digest=bytes(32),
    micro_batch_digests=[bytes(32), bytes(32)],
    gradient_digest=bytes(32),
    optimizer_digest=bytes(32),
    random_state_digest=bytes(32),
    num_threads=1,
    trained_tokens=4,
)
WEIGHTS = WeightsPublished(
    weight_version=4,
    parent_version=3,
    step=3,
    tensor_names=["a.weight", "b.weight"],
    tensor_dtypes=["float32"] * 2,
    tensor_shapes=[np.array([2, 2]), np.array([2])],
    tensor_checksums=[bytes(32)] * 2,
    root=bytes(32),
    size_bytes=24,
    transport="none",
    acknowledged_by=[],
)
OTHER = bytes([1]) * 32
CHANGES: list[tuple[str, dict[str, object], str]] = [
    ("settings", {"settings_id": OTHER, "settings": '{"lr":1}'}, ""),
    ("batch", {"indices": np.array([6, 5])}, "samples"),
    ("batch", {"batch_digest": OTHER}, ""),
    ("micro-batches", {"micro_batch_width": 9}, "offsets, ranks, rows, width, widths"),
    (
        "micro-batches",
        {"micro_batch_widths": np.array([8, 7], np.int32)},
        "offsets, ranks, rows, width, widths",
    ),
    ("log-probs", {"micro_batch_digests": [bytes(32), OTHER]}, "micro-batch 1"),
    ("loss", {"loss": -0.0}, ""),
    ("gradients", {"gradient_digest": OTHER}, ""),
    ("grad norm", {"grad_norm": 1.0000000000000002}, ""),
    ("learning rate", {"learning_rate": 0.2}, ""),
    ("metrics", {"metric_names": ["loss", "kl"]}, "names"),
    ("metrics", {"metric_values": np.array([-0.0, np.nan])}, "loss"),
    ("metrics", {"metric_values": np.array([0.0, np.copysign(np.nan, -1)])}, "ref_kl"),
    ("optimizer", {"optimizer_digest": OTHER}, ""),
    ("random state", {"random_state_digest": OTHER}, ""),
]


@pytest.mark.parametrize(("quantity", "change", "where"), CHANGES)
def test_each_quantity(quantity, change, where):
    found = compare_steps(STEP, dataclasses.replace(STEP, **change), WEIGHTS, WEIGHTS)
    assert found is not None
    assert (found.step, found.weight_version) == (3, 4)
    assert (found.quantity, found.where) == (quantity, where)
    assert found.expected != found.found
    assert f"step 3 (version 4): {quantity}" in str(found)


def test_weights_name_the_tensor():
    changed = dataclasses.replace(WEIGHTS, tensor_checksums=[bytes(32), OTHER], root=OTHER)
    found = compare_steps(STEP, STEP, WEIGHTS, changed)
    assert found is not None
    assert found.quantity == "weights"
    assert "'b.weight'" in found.where


def test_the_first_of_many_is_named():
    """All later differences follow from it."""
    weights = dataclasses.replace(WEIGHTS, root=OTHER)
    for at, (quantity, _, _) in enumerate(CHANGES):
        changes: dict[str, object] = {}
        for _, change, _ in CHANGES[at:]:
            changes |= change
        found = compare_steps(STEP, dataclasses.replace(STEP, **changes), WEIGHTS, weights)
        assert found is not None
        assert found.quantity == (
            "weights" if quantity in ("optimizer", "random state") else quantity
        )


def test_equal_bits_are_equal_and_measurements_do_not_count():
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    recorded = dataclasses.replace(STEP, loss=nan, train_time_s=1.0)
    again = dataclasses.replace(STEP, loss=nan, train_time_s=2.0)
    assert compare_steps(recorded, again, WEIGHTS, WEIGHTS) is None
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000002))[0]
    assert compare_steps(recorded, dataclasses.replace(STEP, loss=other), WEIGHTS, WEIGHTS)


SIGNALS = [
    SignalRecorded(
        index=index,
        step=3,
        settings_id=bytes(32),
        loss_mask=np.array([1, 0, 1], np.uint8),
        log_probs=np.array([-1.0, np.nan, -0.0], np.float32),
        ref_log_probs=np.array([-1.0, np.nan, -2.0], np.float32),
        values=None,
        advantages=np.array([0.5, 0.0, 0.5], np.float32),
        returns=np.array([1.0, 1.0, 1.0], np.float32),
        correction_weights=np.array([1.0, 0.0, 2.0], np.float32),
    )
    for index in (9, 5)
]
OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
OTHER_SIGNALS: list[tuple[str, object, str]] = [
    ("settings_id", OTHER, "sample 5"),
    ("loss_mask", np.array([1, 1, 0], np.uint8), "sample 5, position 1"),
    ("loss_mask", np.array([1, 1], np.uint8), "sample 5, dtype and length"),
    ("log_probs", np.array([-1.0, np.nan, 0.0], np.float32), "sample 5, position 2"),
    ("log_probs", np.array([-1.0, OTHER_NAN, -0.0], np.float32), "sample 5, position 1"),
    ("ref_log_probs", None, "sample 5, all positions"),
    ("values", np.zeros(3, np.float32), "sample 5, all positions"),
    ("advantages", np.array([0.5, 0.0, 0.50000006], np.float32), "sample 5, position 2"),
    ("advantages", np.array([0.5, 0.0, 0.5], np.float64), "sample 5, dtype and length"),
    ("returns", np.array([1.0, 2.0, 3.0], np.float32), "sample 5, position 1"),
    ("correction_weights", np.array([1.0, 0.0, 1.5], np.float32), "sample 5, position 2"),
    ("correction_weights", None, "sample 5, all positions"),
    ("teacher_log_probs", np.zeros(3, np.float32), "sample 5, all positions"),
]


def test_nothing_of_a_signal_is_left_out():
    """Whatever is recorded of a sample's tokens is compared when its step is run again."""
    recorded = {c.name for c in SignalRecorded.COLUMNS if not c.measurement}
    assert recorded - {"index", "step", "settings_id"} == set(_SIGNALS)


@pytest.mark.parametrize(("quantity", "value", "where"), OTHER_SIGNALS)
def test_each_signal(quantity, value, where):
    changed = [SIGNALS[0], dataclasses.replace(SIGNALS[1], **{quantity: value})]
    found = compare_signals(SIGNALS, changed, step=3, weight_version=4)
    assert found is not None
    assert (found.step, found.weight_version) == (3, 4)
    assert (found.quantity, found.where) == (quantity, where)
    assert found.expected != found.found


def test_equal_signals_in_another_order_are_equal():
    again = [
        dataclasses.replace(s, **{n: getattr(s, n).copy() for n in ("log_probs", "advantages")})
        for s in reversed(SIGNALS)
    ]
    assert compare_signals(SIGNALS, again, step=3, weight_version=4) is None
    assert compare_signals([], [], step=3, weight_version=4) is None


def test_the_first_of_many_signals_is_named_before_what_follows_from_it():
    """Sample 9 comes first, but its advantage follows from what differs in sample 5."""
    again = [
        dataclasses.replace(SIGNALS[0], advantages=np.zeros(3, np.float32)),
        dataclasses.replace(SIGNALS[1], log_probs=np.zeros(3, np.float32)),
    ]
    found = compare_signals(SIGNALS, again, step=3, weight_version=4)
    assert found is not None
    assert (found.quantity, found.where) == ("log_probs", "sample 5, position 0")


@pytest.mark.parametrize("again", [SIGNALS[:1], [*SIGNALS, SIGNALS[0]], []])
def test_signals_of_other_samples_are_a_difference(again):
    found = compare_signals(SIGNALS, again, step=3, weight_version=4)
    assert found is not None
    assert (found.quantity, found.where) == ("signals", "samples")
    assert found.expected == "[5, 9]"
