"""A ledger reader over events in memory, and short ways to make samples of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from blake3 import blake3

from ledger.encode import events_to_table
from ledger.events import (
    ObservationAppended,
    PromptIssued,
    RoutingRecorded,
    SampleScored,
    SegmentGenerated,
)
from ledger.fields import Event
from ledger.schema import arrow_schema


class MemoryReader:
    """What `Reader.table` gives, without a store; `seq` is the place in the list of events."""

    def __init__(self, events: Sequence[Event]) -> None:
        by_kind: dict[str, list[tuple[int, Event]]] = defaultdict(list)
        for seq, event in enumerate(events):
            by_kind[event.KIND].append((seq, event))
        self.tables = {
            kind: self._place(events_to_table([e for _, e in rows]), [seq for seq, _ in rows])
            for kind, rows in by_kind.items()
        }

    @staticmethod
    def _place(table: pa.Table, seqs: list[int]) -> pa.Table:
        n = table.num_rows
        table = table.append_column("run_id", pa.array(["run"] * n, pa.string()))
        table = table.append_column("branch", pa.array(["main"] * n, pa.string()))
        return table.append_column("seq", pa.array(seqs, pa.int64()))

    def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
        table = self.tables.get(kind)
        if table is None:
            table = self._place(arrow_schema(kind).empty_table(), [])
        return table if columns is None else table.select(list(columns))


def prompt(indices, tokens, *, group=0, rollouts=None) -> PromptIssued:
    tokens = np.asarray(tokens, np.int32)
    return PromptIssued(
        prompt_id=blake3(tokens.tobytes()).digest(),
        group_index=group,
        rollout_step=0,
        round=0,
        indices=np.asarray(indices, np.int64),
        rollout_ids=np.asarray(indices if rollouts is None else rollouts, np.int64),
        tokens=tokens,
        text="",
        source="test",
        source_row=0,
        data_cursor=0,
    )


def segment(index, tokens, log_probs=None, *, start=0, number=0, spans=None, **other):
    """`spans`: (start, end, version) triples."""
    n = len(tokens)
    spans = [(0, n, 0)] if spans is None else spans
    fields = {
        "rollout_id": index,
        "group_index": 0,
        "rollout_step": 0,
        "turn": 0,
        "logprob_mode": "full",
        "logprob_temperature": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 16,
        "stop_token_ids": np.zeros(0, np.int32),
        "sampling_seed": 0,
        "finish_reason": "stop",
        "engine": "scripted",
        "engine_version": "0",
    }
    return SegmentGenerated(
        index=index,
        segment=number,
        start=start,
        tokens=np.asarray(tokens, np.int32),
        rollout_log_probs=np.asarray([-1.0] * n if log_probs is None else log_probs, np.float32),
        span_starts=np.asarray([s for s, _, _ in spans], np.int32),
        span_ends=np.asarray([e for _, e, _ in spans], np.int32),
        span_versions=np.asarray([v for _, _, v in spans], np.int64),
        **(fields | other),
    )


def observation(index, tokens, *, start, rollout_id=None) -> ObservationAppended:
    return ObservationAppended(
        index=index,
        rollout_id=index if rollout_id is None else rollout_id,
        turn=0,
        start=start,
        tokens=np.asarray(tokens, np.int32),
        source="tool",
    )


def score(index, reward, *, rollout_id=None, parts=None) -> SampleScored:
    return SampleScored(
        index=index,
        rollout_id=index if rollout_id is None else rollout_id,
        group_index=0,
        raw_reward=float(reward),
        reward=float(reward),
        part_names=list(parts or {}),
        part_values=np.array(list((parts or {}).values()), np.float64),
        verifier="test",
        verifier_version="0",
    )


def routing(index, ids, *, start=0, number=0, num_experts=4, **other) -> RoutingRecorded:
    """`ids` [rows, layers, K]."""
    ids = np.asarray(ids, np.uint8)
    rows, layers, topk = ids.shape
    fields = {
        "rows": rows,
        "layers": layers,
        "topk": topk,
        "num_experts": num_experts,
        "dtype": "uint8",
        "expert_ids": ids.tobytes(),
    }
    return RoutingRecorded(index=index, segment=number, start=start, **(fields | other))
