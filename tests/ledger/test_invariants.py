"""Each invariant refuses what breaks it, by event, row, field, expected and found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import open_ledger
from ledger.encode import table_to_events
from ledger.errors import InvalidEvent
from ledger.events import Event, RoutingRecorded
from ledger.writer import Writer
from tests.ledger import factory
from tests.ledger.factory import ints, longs


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A writer to a run with versions 0 to 2 and the responses of samples 0 to 11."""
    with open_ledger(tmp_path_factory.mktemp("ledger"), create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="p") as made:
            made.append([factory.weights(v, v - 1 if v else None, None) for v in range(3)])
            made.append(factory.responses(0))
            yield made


SEGMENT = factory.segment(100, ints(5, 6, 7), rollout_step=0)
PROMPT = factory.prompt(50, 0)
STEP = factory.step(0, [0, 1, 2, 3], rollout_step=0, version_in=0, version_out=1)
WEIGHTS = factory.weights(9, 2, None)


def routing(**changes: Any) -> RoutingRecorded:
    made: dict[str, Any] = {
        "index": 0,
        "segment": 0,
        "start": 0,
        "rows": 2,
        "layers": 1,
        "topk": 2,
        "num_experts": 4,
        "dtype": "uint8",
    }
    made["expert_ids"] = bytes([0, 1, 2, 3])
    return RoutingRecorded(**(made | changes))


def spans(starts: Sequence[int], ends: Sequence[int], versions: Sequence[int]) -> dict[str, Any]:
    return {
        "span_starts": ints(*starts),
        "span_ends": ints(*ends),
        "span_versions": longs(*versions),
    }


def masked(index: int, mask: Sequence[int], **changes: Any) -> Event:
    array = np.array(mask, np.uint8)
    made = factory.signal(index, 0, array, np.zeros(len(mask), np.float32))
    return dataclasses.replace(made, loss_mask=array, **changes)


def kept(ids: list[int], offsets: list[int]) -> dict[str, Any]:
    return {
        "rollout_top_p_token_ids": ints(*ids),
        "rollout_top_p_token_offsets": ints(*offsets),
    }


F32 = np.float32
WITH_TOOL = masked(8, [1, 1, 1, 0, 0, 1, 1])
"""Tokens 3 and 4 of sample 8 are a tool's."""
TOOL_ZERO = np.array([-1, -1, -1, np.nan, 0, -1, -1], F32)
CASES: list[tuple[Event, dict[str, Any], str, str, str]] = [
    # Invariant I
    (SEGMENT, {"rollout_log_probs": np.zeros(2, F32)}, "rollout_log_probs", "3 values", "2 values"),
    (SEGMENT, {"sampler_log_probs": np.zeros(4, F32)}, "sampler_log_probs", "3 values", "4 values"),
    (SEGMENT, {"tokens": ints(5, -1, 7)}, "tokens", "0 or more", "-1 at position 1"),
    (SEGMENT, {"sampling_seed": -1}, "sampling_seed", "0 or more", "-1"),
    (SEGMENT, {"start": -1}, "start", "0 or more", "-1"),
    (SEGMENT, {"logprob_mode": "half"}, "logprob_mode", "['full', 'processed']", "'half'"),
    (SEGMENT, {"finish_reason": "bored"}, "finish_reason", "'stop'", "'bored'"),
    (SEGMENT, kept([1, 2, 3], [0, 1, 2]), "rollout_top_p_token_offsets", "4: one more", "3"),
    (SEGMENT, kept([1, 2, 3], [0, 1, 1, 3]), "rollout_top_p_token_offsets", "one id a set", "1, 1"),
    (SEGMENT, kept([1, 2, 3], [0, 1, 2, 4]), "rollout_top_p_token_offsets", "up to 3", "4"),
    (SEGMENT, kept([1, -2, 3], [0, 1, 2, 3]), "rollout_top_p_token_ids", "0 or more", "-2"),
    (SEGMENT, spans([], [], []), "span_starts", "all 3 tokens", "no span"),
    (SEGMENT, spans([1], [3], [0]), "span_starts", "a span from 0", "1"),
    (SEGMENT, spans([0], [2], [0]), "span_ends", "ends at 3", "2"),
    (SEGMENT, spans([0], [4], [0]), "span_ends", "ends at 3", "4"),
    (SEGMENT, spans([0, 2], [1, 3], [0, 1]), "span_starts", "a span from 1", "2"),
    (SEGMENT, spans([0, 1], [2, 3], [0, 1]), "span_starts", "a span from 2", "1"),
    (SEGMENT, spans([0, 0], [0, 3], [0, 1]), "span_ends", "above its start", "0"),
    (SEGMENT, spans([0, 1], [1, 3], [0]), "span_versions", "2 values", "1 values"),
    (PROMPT, {"prompt_id": bytes(32)}, "prompt_id", "blake3 of the ids", "00000000"),
    (PROMPT, {"rollout_ids": longs(1)}, "rollout_ids", "4 values", "1 values"),
    # Invariant III
    (SEGMENT, spans([0], [3], [7]), "span_versions", "published", "7"),
    (SEGMENT, spans([0, 1], [1, 3], [1, 0]), "span_versions", "from 1", "0"),
    (STEP, {"weight_version_in": 8}, "weight_version_in", "published", "8"),
    # Invariant II
    (
        masked(0, [1, 1, 1]),
        {"loss_mask": np.array([1, 2, 0], np.uint8)},
        "loss_mask",
        "0 or 1",
        "2",
    ),
    (masked(0, [1, 1, 1]), {"advantages": np.zeros(2, F32)}, "advantages", "3 values", "2 values"),
    (masked(0, [1, 1, 1]), {"log_probs": np.zeros(4, F32)}, "log_probs", "3 values", "4 values"),
    (masked(0, [1, 1, 1]), {"values": np.zeros(4, F32)}, "values", "3 values", "4 values"),
    (masked(8, [1, 1, 1, 0, 1, 1, 1]), {}, "loss_mask", "nothing was sampled", "1 at token 4"),
    (masked(8, [1, 1, 1, 0, 0, 1]), {}, "loss_mask", "7 values", "6 values"),
    (WITH_TOOL, {"log_probs": np.zeros(7, F32)}, "log_probs", "nothing was s", "0.0 at token 3"),
    (WITH_TOOL, {"ref_log_probs": TOOL_ZERO}, "ref_log_probs", "nothing was s", "0.0 at token 4"),
    (WITH_TOOL, {"teacher_log_probs": TOOL_ZERO}, "teacher_log_probs", "NaN where", "at token 4"),
    (masked(777, [1]), {}, "loss_mask", "0 values", "1 values"),
    (STEP, {"indices": longs(0, 1, 1, 3)}, "indices", "each sample once", "sample 1"),
    (STEP, {"micro_batch_offsets": ints(0, 3)}, "micro_batch_offsets", "3 offsets", "[0, 3]"),
    (STEP, {"micro_batch_offsets": ints(0, 3, 3)}, "micro_batch_offsets", "to 4", "[0, 3, 3]"),
    (STEP, {"metric_values": np.zeros(1)}, "metric_values", "2 values", "1 values"),
    # Invariant IV
    (WEIGHTS, {"root": bytes(32)}, "root", "root of these tensors", "0000"),
    (WEIGHTS, {"tensor_names": ["b", "a"]}, "tensor_names", "sorted", "'a' after 'b'"),
    (WEIGHTS, {"tensor_names": ["a", "a"]}, "tensor_names", "unique", "'a' after 'a'"),
    (WEIGHTS, {"tensor_dtypes": ["float32"]}, "tensor_dtypes", "2 values", "1 values"),
    (WEIGHTS, {"tensor_shapes": [longs(2, 3)]}, "tensor_shapes", "2 values", "1 values"),
    (WEIGHTS, {"tensor_shapes": [longs(3, 2), longs(4)]}, "root", "root of these", ""),
    # Routing and the rest
    (routing(), {"rows": 3}, "expert_ids", "6 ids of uint8: 6 bytes", "4 bytes"),
    (routing(), {"expert_ids": bytes([0, 1, 2, 4])}, "expert_ids", "below 4", "4"),
    (routing(), {"dtype": "uint16", "expert_ids": bytes(8)}, "dtype", "uint8", "uint16"),
    (routing(), {"num_experts": 257}, "dtype", "uint16 for 257 experts", "uint8"),
    (routing(), {"weights": bytes(8)}, "weights", "4 float32", "8 bytes"),
    (
        routing(start=5, segment=3),
        {"expert_ids": bytes([0, 1, 2, 2])},
        "expert_ids",
        "2 different experts of each token and layer",
        "[2, 2]: sample 0, segment 3, layer 0 (this token), position 6",
    ),
    (
        routing(rows=3, layers=2),
        {"expert_ids": bytes([1, 2, 0, 0] * 3)},
        "expert_ids",
        "2 different experts",
        "[0, 0]: sample 0, segment 0, layer 1 (all zero: nobody captured this layer), position 0",
    ),
    (routing(), {"segment": -1}, "segment", "-1 beside the policy_version", "policy_version None"),
    (routing(), {"policy_version": 1}, "segment", "the engine call", "segment 0, policy_version 1"),
    (
        routing(),
        {"policy_version": 9, "segment": -1},
        "policy_version",
        "a weight version that was published",
        "9",
    ),
    (factory.two_turns(8)[1], {"source": "dream"}, "source", "'tool'", "'dream'"),
    (factory.two_turns(8)[1], {"tokens": ints(-5)}, "tokens", "0 or more", "-5"),
    (
        factory.decide(0, "kept", rollout_step=0),
        {"decision": "lost"},
        "decision",
        "'kept'",
        "'lost'",
    ),
    (factory.score(0, 1.0), {"part_values": np.zeros(2)}, "part_values", "1 values", "2 values"),
    (factory.checkpoint(0, None), {"file_sizes": longs()}, "file_sizes", "1 values", "0 values"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].KIND}-{c[2]}-{c[4]}")
def test_what_breaks_an_invariant_is_refused(
    writer: Writer, case: tuple[Event, dict[str, Any], str, str, str]
) -> None:
    event, changes, field, expected, found = case
    head = writer._ledger.run("r").head_seq
    bad = dataclasses.replace(event, **changes)
    good = factory.score(0, 1.0)
    row = 1 if event.KIND == good.KIND else 0
    with pytest.raises(InvalidEvent) as caught:
        writer.append([good, bad])
    text = str(caught.value)
    assert f"event '{event.KIND}', row {row}, field '{field}'" in text
    assert expected in text.split("expected:")[1].split("found:")[0]
    assert found in text.split("found:")[1]
    assert writer._ledger.run("r").head_seq == head


def test_the_row_at_fault_is_named(writer: Writer) -> None:
    bad = dataclasses.replace(SEGMENT, index=102, tokens=ints(5, 6, -7))
    good = [dataclasses.replace(SEGMENT, index=i) for i in (100, 101)]
    with pytest.raises(InvalidEvent, match="row 2, field 'tokens'"):
        writer.append([*good, bad])
    with pytest.raises(InvalidEvent, match=r"(?s)row 0, field 'index'.*index 100, segment 0 more"):
        writer.append([SEGMENT, SEGMENT])
    with pytest.raises(InvalidEvent, match=r"(?s)field 'index'.*index 0, step 0 more than once"):
        writer.append([masked(0, [1, 1, 1]), masked(0, [1, 1, 0])])


def test_an_overlap_of_routing_is_refused(writer: Writer) -> None:
    first, second = routing(index=400), routing(index=400, segment=1, start=1)
    with pytest.raises(InvalidEvent, match=r"(?s)row 1, field 'start'.*segment 0 has rows up to"):
        writer.append([first, second])
    with pytest.raises(InvalidEvent, match="1, segment 1: an overlap"):
        writer.append([dataclasses.replace(second, rows=2), first])
    again = dataclasses.replace(first, segment=-1, policy_version=2)
    later = dataclasses.replace(second, start=2)
    writer.append([first, later, again, dataclasses.replace(again, policy_version=1)])
    counted = writer._ledger.reader("r").sql(
        "SELECT recorded_by, count(*) AS n FROM routing WHERE index = 400 GROUP BY 1 ORDER BY 1"
    )
    assert counted.to_pylist() == [
        {"recorded_by": "engine", "n": 2},
        {"recorded_by": "old_policy", "n": 2},
    ]


def test_a_hole_in_a_response_is_refused(writer: Writer) -> None:
    late = dataclasses.replace(SEGMENT, index=200, start=4)
    with pytest.raises(InvalidEvent, match="sample 200 has a piece at 4, not 0"):
        writer.append([late, masked(200, [1, 1, 1])])


def test_what_is_true_is_stored_as_it_is(writer: Writer) -> None:
    raw = np.array([0x80000000, 0xFF800000, 0x7FC00001], np.uint32).view(F32)
    truth = dataclasses.replace(SEGMENT, index=300, rollout_log_probs=raw)
    positive = dataclasses.replace(SEGMENT, index=301, rollout_log_probs=np.ones(3, F32))
    nobody = dataclasses.replace(SEGMENT, index=302, **spans([0, 1], [1, 3], [1, -1]))
    empty = dataclasses.replace(
        SEGMENT,
        index=303,
        tokens=ints(),
        rollout_log_probs=np.empty(0, F32),
        finish_reason="abort",
        **spans([], [], []),
    )
    two = dataclasses.replace(SEGMENT, index=304, **spans([0, 1], [1, 3], [1, 2]))
    writer.append([truth, positive, nobody, empty, two])
    # Signals in the same append as the response, a prompt-only sample, aborted tokens masked out.
    own = dataclasses.replace(SEGMENT, index=305)
    writer.append([own, masked(305, [1, 0, 1]), masked(303, []), masked(8, [1, 1, 1, 0, 0, 0, 1])])
    # A version that the same append publishes may be cited in it.
    fresh = dataclasses.replace(SEGMENT, index=306, **spans([0], [3], [7]))
    writer.append([fresh, factory.weights(7, 2, None)])
    table = writer._ledger.reader("r").table("segment_generated", where={"index": (300, 300)})
    (back,) = (e for e in table_to_events(table) if e.index == 300)  # type: ignore[attr-defined]
    assert back.rollout_log_probs.view(np.uint32).tolist() == raw.view(np.uint32).tolist()  # type: ignore[attr-defined]


def test_256_experts_fit_one_byte_and_257_take_two(writer: Writer, tmp_path: Path) -> None:
    one = routing(num_experts=256, expert_ids=bytes([0, 255, 7, 9]))
    ids = np.array([256, 0, 1, 255], "<u2").tobytes()
    two = routing(num_experts=257, dtype="uint16", expert_ids=ids, weights=bytes(16), index=1)
    writer.append([one, two])
    found = table_to_events(writer._ledger.reader("r").table("routing_recorded"))[-2:]
    assert [e.expert_ids for e in found] == [one.expert_ids, ids]  # type: ignore[attr-defined]
    too_large = np.array([257, 0, 1, 2], "<u2").tobytes()
    with pytest.raises(InvalidEvent, match="below 257"):
        writer.append([dataclasses.replace(two, expert_ids=too_large)])
