"""How far the trainer's log-probs lie from the engine's: sums over spans, without a row a token.

SQL would carry every token through a join. Here the engine calls of a step's samples are found by
their numbers alone, and their log-probs are compared in place, a window of samples at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ledger.scan import PLACE_TYPES, TableSource

__all__ = ["MISMATCH_SCHEMA", "mismatch_table"]

MISMATCH_SCHEMA = pa.schema(
    [
        *(pa.field(name, type_) for name, type_ in PLACE_TYPES.items()),
        pa.field("step", pa.int64()),
        pa.field("index", pa.int64()),
        pa.field("weight_version", pa.int64()),
        pa.field("tokens", pa.int64()),
        pa.field("total", pa.float64()),
        pa.field("largest", pa.float32()),
        pa.field("not_finite", pa.int64()),
    ]
)
"""One row a signal and span; `ledger views mismatch` says what the columns mean."""

_WINDOW_ROWS = 8192
"""Signals compared at once: what bounds the memory."""
_SPREAD = 4
"""How many rows more than wanted a slice may hold."""

Ints = npt.NDArray[np.int64]


def mismatch_table(reader: TableSource) -> pa.Table:
    """All rows of MISMATCH_SCHEMA: for each signal, every span of one version of its engine calls.

    Compared are tokens with mask 1 whose difference is finite. Tokens that a signal is too short
    for are not compared; `ledger check` reports them.
    """
    signals = reader.table(
        "signal_recorded", ["run_id", "branch", "seq", "step", "index", "loss_mask", "log_probs"]
    )
    calls = reader.table(
        "segment_generated",
        ["index", "start", "rollout_log_probs", "span_starts", "span_ends", "span_versions"],
    )
    numbers = _numbers(calls, "index")
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    parts = []
    for first in range(0, signals.num_rows, _WINDOW_ROWS):
        window = signals.slice(first, _WINDOW_ROWS)
        wanted = _numbers(window, "index")
        low = np.searchsorted(in_order, wanted, "left")
        count = np.searchsorted(in_order, wanted, "right") - low
        signal = np.repeat(np.arange(len(wanted)), count)
        call = order[np.repeat(low, count) + _within(count)]
        near, at = _near(calls, call)
        parts.append(_compare(window, near, signal, at))
    return pa.concat_tables(parts) if parts else MISMATCH_SCHEMA.empty_table()


def _near(calls: pa.Table, wanted: Ints) -> tuple[pa.Table, Ints]:
    """A table with the wanted rows, and where in it they are.

    A step trains on what was generated just before: one slice holds it. Where that would be far
    more than is wanted, the rows are copied, which costs more for each.
    """
    if not len(wanted):
        return calls.slice(0, 0), wanted
    first, last = int(wanted.min()), int(wanted.max())
    if last - first < _SPREAD * len(wanted):
        return calls.slice(first, last - first + 1), wanted - first
    return calls.take(pa.array(wanted)), np.arange(len(wanted))


def _compare(signals: pa.Table, calls: pa.Table, signal: Ints, at: Ints) -> pa.Table:
    """Row at[i] of `calls` belongs to row signal[i] of `signals`."""
    trainer, trainer_at, trainer_length = _lists(signals, "log_probs")
    mask, mask_at, _ = _lists(signals, "loss_mask")
    engine, engine_at, _ = _lists(calls, "rollout_log_probs")
    starts, spans_at, spans = _lists(calls, "span_starts")
    ends, _, _ = _lists(calls, "span_ends")
    versions, _, _ = _lists(calls, "span_versions")
    spans = spans[at]
    pair = np.repeat(np.arange(len(at)), spans)
    span = spans_at[at][pair] + _within(spans)
    row, call, start = signal[pair], at[pair], starts[span]
    begin = _numbers(calls, "start")[call] + start
    length = np.minimum(ends[span] - start, trainer_length[row] - begin)
    kept = length > 0
    if not kept.any():
        return MISMATCH_SCHEMA.empty_table()
    span, row, begin, length = span[kept], row[kept], begin[kept], length[kept]
    of_engine = engine_at[call[kept]] + start[kept]
    first = np.cumsum(length) - length

    # An infinite log-prob on both sides gives NaN: it is counted below.
    with np.errstate(invalid="ignore"):
        difference = np.abs(
            _gather(trainer, trainer_at[row] + begin, length) - _gather(engine, of_engine, length)
        )
    used = _gather(mask, mask_at[row] + begin, length) == 1
    finite = np.isfinite(difference)
    compared = used & finite
    if compared.all():
        tokens, not_finite = length, np.zeros(len(length), np.int64)
    else:
        difference = np.where(compared, difference, np.float32(0))
        tokens = np.add.reduceat(compared, first, dtype=np.int64)
        not_finite = np.add.reduceat(used & ~finite, first, dtype=np.int64)
    columns: dict[str, Any] = {
        name: signals.column(name).take(pa.array(row))
        for name in ("run_id", "branch", "seq", "step", "index")
    }
    columns["weight_version"] = pa.array(versions[span], mask=versions[span] < 0)
    columns["tokens"] = tokens
    columns["total"] = np.add.reduceat(difference, first, dtype=np.float64)
    columns["largest"] = pa.array(np.maximum.reduceat(difference, first), mask=tokens == 0)
    columns["not_finite"] = not_finite
    return pa.table(columns).cast(MISMATCH_SCHEMA)


def _gather(values: npt.NDArray[Any], at: Ints, length: Ints) -> npt.NDArray[Any]:
    """values[at[i] : at[i] + length[i]] for every i, one after the other; in place if they are."""
    first = np.cumsum(length) - length
    if not len(at):
        return values[:0]
    if (at - at[0] == first).all():
        return values[at[0] : at[0] + int(length.sum())]
    return values[np.repeat(at - first, length) + np.arange(int(length.sum()))]


def _within(count: Ints) -> Ints:
    """0, 1, …, count[i] − 1 for every i, one after the other."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


def _numbers(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _lists(table: pa.Table, name: str) -> tuple[npt.NDArray[Any], Ints, Ints]:
    """Values of a list column in one array, where each row begins in it, and its length."""
    column = table.column(name)
    # One piece is taken as it is; combine_chunks would copy it.
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    length = np.asarray(whole.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return whole.flatten().to_numpy(zero_copy_only=False), np.cumsum(length) - length, length
