"""Durable appends against the same bytes written and synced without a ledger."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger import Ledger
from ledger.encode import events_to_table
from ledger.events import Event, SampleScored
from ledger.hashing import column_digests
from ledger.invariants import check_tables
from ledger.segment import Identity, segment_file, serialise
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import (
    RUN,
    emptied,
    generated,
    new_ledger,
    routed,
    segment_files,
    write_durably,
)

__all__ = ["append_figures", "commit_figures"]

GROUP = "durable append"
_RAW = "write + fsync + rename + dir fsync"
_NONE = np.empty(0, np.float64)


def append_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Large segments of tokens with log-probs, and of routing."""
    sizes = (8,) if quick else (8, 32)
    for megabytes in sizes:
        events: Sequence[Event] = generated(megabytes << 20)
        yield _large(folder, "tokens and log-probs", events, 0.85, 3 if quick else 9)
    yield _large(folder, "routing", routed((16 if quick else 32) << 20), 0.8, 3 if quick else 9)


def _large(
    folder: Path, name: str, events: Sequence[Event], goal: float, repetitions: int
) -> Figure:
    kind = type(events[0]).KIND
    raw = emptied(folder / "raw")
    number = itertools.count()
    with new_ledger(emptied(folder / "ledger")) as (ledger, writer):
        writer.append(events)
        stored = segment_files(ledger, kind)[0].read_bytes()
        times = interleaved(
            {
                "raw": lambda: write_durably(raw, f"{next(number)}", [stored]),
                "ledger": lambda: writer.append(events),
            },
            repetitions,
        )
        split = _split(ledger, events)
    one = times["ledger"]
    ratio = times["raw"].seconds / one.seconds
    inside = ", ".join(f"{what.removesuffix('_ms')} {ms:.0f}" for what, ms in split.items())
    return Figure(
        group=GROUP,
        name=f"{name}, {len(stored) / 1e6:.0f} MB",
        against=_RAW,
        ratio=ratio,
        goal=goal,
        mb_per_s=len(stored) / 1e6 / one.seconds,
        mb_per_cpu_s=len(stored) / 1e6 / one.cpu_seconds,
        note=f"{one.seconds * 1e3:.0f} ms against {times['raw'].seconds * 1e3:.0f}, CPU "
        f"{one.cpu_seconds * 1e3:.0f} ms against {times['raw'].cpu_seconds * 1e3:.0f}; "
        f"its work in ms, each alone: {inside}",
        details={
            "ledger_s": one.seconds,
            "raw_s": times["raw"].seconds,
            "ledger_cpu_s": one.cpu_seconds,
            "raw_cpu_s": times["raw"].cpu_seconds,
            "size_bytes": len(stored),
            **split,
        },
    )


def _split(ledger: Ledger, events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of the work of an append that is not the disk's, each part alone."""
    made: dict[str, Any] = {}

    def encode() -> None:
        made["table"] = events_to_table(events, recorded_at=1)

    def layout() -> None:
        pieces = serialise(made["table"], Identity(RUN, "main", "split", 1, 0, 0))
        segment_file("split", len(events), pieces)

    parts: dict[str, Callable[[], Any]] = {
        "encode_ms": encode,
        "logical_hash_ms": lambda: column_digests(made["table"]),
        "checks_ms": lambda: check_tables(
            {type(events[0]).KIND: made["table"]}, ledger.lookup(RUN)
        ),
        "file_and_its_hash_ms": layout,
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(4):
        for name, function in parts.items():
            began = time.perf_counter()
            function()
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def commit_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """One event a commit, one writer, against a new synced file of the same bytes each."""
    raw = emptied(folder / "raw")
    number = itertools.count()
    with new_ledger(emptied(folder / "ledger")) as (ledger, writer):
        writer.append([_score(0)])
        stored = segment_files(ledger, SampleScored.KIND)[0].read_bytes()
        times = interleaved(
            {
                "raw": lambda: write_durably(raw, f"{next(number)}", [stored]),
                "ledger": lambda: writer.append([_score(next(number))]),
            },
            20 if quick else 100,
        )
    one, file = times["ledger"].seconds, times["raw"].seconds
    yield Figure(
        group=GROUP,
        name="small commits: one event each",
        against="a new fsynced file each",
        ratio=file / one,
        goal=0.8,
        note=f"{1 / one:.0f} a second against {1 / file:.0f}; CPU "
        f"{times['ledger'].cpu_seconds * 1e3:.1f} ms a commit; a commit syncs the file, its "
        "directory and the catalog's log: one sync more",
        details={"ledger_s": one, "raw_s": file, "size_bytes": len(stored)},
    )


def _score(index: int) -> SampleScored:
    return SampleScored(
        index=index,
        rollout_id=index,
        group_index=index // 8,
        raw_reward=1.0,
        reward=1.0,
        part_names=[],
        part_values=_NONE,
        verifier="bench",
        verifier_version="1",
    )
