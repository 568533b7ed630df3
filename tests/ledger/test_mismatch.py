"""The view mismatch gives what a query over trained_tokens gives, however the rows lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import ledger.mismatch
from ledger.events import Event
from ledger.sql import run_query
from tests.ledger.factory import MemoryReader, ints, prompt, segment, signal, table_of

BY_TOKEN = """
SELECT step_branch AS branch, step, index, weight_version, count(*) FILTER (finite) AS tokens,
       coalesce(sum(difference::DOUBLE) FILTER (finite), 0) AS total,
       max(difference) FILTER (finite) AS largest, count(*) FILTER (NOT finite) AS not_finite
FROM (SELECT *, abs(log_prob - rollout_log_prob) AS difference,
             isfinite(log_prob - rollout_log_prob) AS finite
      FROM trained_tokens WHERE loss_mask = 1)
GROUP BY ALL ORDER BY ALL
"""
BY_SPAN = """
SELECT branch, step, index, weight_version, sum(tokens)::BIGINT AS tokens, sum(total) AS total,
       max(largest) AS largest, sum(not_finite)::BIGINT AS not_finite
FROM mismatch WHERE tokens + not_finite > 0
GROUP BY ALL ORDER BY branch, step, index, weight_version
"""


def agree(reader: Any) -> list[dict[str, Any]]:
    by_token = run_query(reader, BY_TOKEN).to_pylist()
    by_span = run_query(reader, BY_SPAN).to_pylist()
    for one, other in zip(by_token, by_span, strict=True):
        assert other == {**one, "total": pytest.approx(one["total"], rel=1e-6)}
    return by_span


def in_chunks(table: pa.Table, rows: int) -> pa.Table:
    return pa.concat_tables(
        [table.slice(i, rows).combine_chunks() for i in range(0, table.num_rows, rows)]
    )


@pytest.mark.parametrize("spread", [4, 0])
@pytest.mark.parametrize(("window", "rows"), [(8192, 100), (3, 2)])
def test_the_story(
    everything: MemoryReader, monkeypatch: pytest.MonkeyPatch, spread: int, window: int, rows: int
) -> None:
    monkeypatch.setattr(ledger.mismatch, "_WINDOW_ROWS", window)
    monkeypatch.setattr(ledger.mismatch, "_SPREAD", spread)
    for kind in ("segment_generated", "signal_recorded"):
        everything.tables[kind] = in_chunks(everything.tables[kind], rows)
    found = agree(everything)
    # Sample 1 has -inf and NaN, sample 12 two versions; 12 to 15 were trained on two branches.
    assert [r["not_finite"] for r in found if r["index"] == 1] == [2]
    assert [(r["branch"], r["weight_version"]) for r in found if r["index"] == 12] == [
        ("main", 0),
        ("main", 1),
        ("rloo", 0),
        ("rloo", 1),
    ]


def test_rows_in_any_order_with_unknown_versions_and_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    calls: list[Event] = []
    signals: list[Event] = []
    for index in range(60):
        lengths = random.integers(1, 9, random.integers(1, 4))
        log_probs = random.normal(size=int(lengths.sum())).astype(np.float32)
        start = 0
        for number, length in enumerate(lengths.tolist()):
            cut = int(random.integers(0, length))
            spans = [(length, 0)] if cut == 0 else [(cut, -1), (length - cut, 2)]
            made = segment(
                index,
                ints(*range(length)),
                rollout_step=0,
                segment=number,
                turn=number,
                start=start,
                spans=spans,
                log_probs=log_probs[start : start + length],
            )
            calls.append(dataclasses.replace(made, rollout_id=index))
            start += length
        if index % 7:
            mask = random.integers(0, 2, start)
            signals.append(signal(index, 0, mask, log_probs))
    random.shuffle(calls)  # type: ignore[arg-type]
    random.shuffle(signals)  # type: ignore[arg-type]
    prompts = [prompt(group, 0) for group in range(15)]
    reader = MemoryReader(
        {
            made[0].KIND: table_of(made[0].KIND, [("main", n, e) for n, e in enumerate(made)])
            for made in (prompts, calls, signals)
        }
    )
    for spread in (1000, 0):
        monkeypatch.setattr(ledger.mismatch, "_SPREAD", spread)
        agree(reader)


def test_a_signal_that_is_too_short_is_compared_as_far_as_it_goes() -> None:
    reader = MemoryReader(
        {
            "segment_generated": table_of(
                "segment_generated", [("main", 1, segment(0, ints(1, 2, 3), rollout_step=0))]
            ),
            "signal_recorded": table_of(
                "signal_recorded",
                [("main", 2, signal(0, 0, np.ones(2), np.array([-0.125, -0.5], np.float32)))],
            ),
        }
    )
    (found,) = run_query(reader, "SELECT tokens, total, mean, largest FROM mismatch").to_pylist()
    # The engine said -0.125 -0.25 -0.375.
    assert found == {"tokens": 2, "total": 0.25, "mean": 0.125, "largest": 0.25}


def test_nothing_to_compare() -> None:
    assert run_query(MemoryReader({}), "SELECT * FROM mismatch").num_rows == 0
