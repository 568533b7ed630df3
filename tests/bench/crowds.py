"""What 64 writers sustain: coroutines over one sink, threads over one writer, on either catalog."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ledger import open_ledger
from ledger.events import SegmentGenerated
from rollout.sink import EventSink
from tests.bench.episodes import version
from tests.bench.figures import Figure
from tests.bench.samples import RUN, emptied, generated

__all__ = ["crowd_figures", "segments"]

GROUP = "64 concurrent writers"
_WRITERS = 64
_TOKENS = 512


def segments(count: int, tokens: int = _TOKENS) -> list[SegmentGenerated]:
    """`count` segments of so many tokens, each of a sample of its own."""
    random = np.random.default_rng(5)
    (like, *_) = generated(1)
    return [
        dataclasses.replace(
            like,
            index=index,
            rollout_id=index,
            group_index=index // 8,
            tokens=random.integers(0, 150_000, tokens, dtype=np.int32),
            rollout_log_probs=-random.exponential(0.5, tokens).astype(np.float32),
            span_ends=np.array([tokens], np.int32),
        )
        for index in range(count)
    ]


def crowd_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Each writer appends one segment of 512 tokens after the other, and waits for each."""
    each = 1 if quick else 20
    repetitions = 1 if quick else 5
    yield from _on("SQLite", folder / "sqlite", None, each, repetitions)
    if quick:
        return  # starting a server takes longer than all else
    with _postgres() as catalog:
        if catalog is None:
            yield Figure(
                group=GROUP,
                name="64 coroutines, PostgreSQL",
                against="one of them",
                ratio=None,
                note="no PostgreSQL server is installed here",
            )
        else:
            yield from _on("PostgreSQL", folder / "postgres", catalog, each, repetitions)


@contextlib.contextmanager
def _postgres() -> Iterator[str | None]:
    from tests.servers.postgres import binaries, postgres_server

    try:
        binaries()
    except RuntimeError:
        yield None
        return
    with postgres_server() as server:
        yield server.database()


def _on(
    name: str, folder: Path, catalog: str | None, each: int, repetitions: int
) -> Iterator[Figure]:
    made = iter(segments(_WRITERS * each * (2 * repetitions + 2) + each * 2 * (repetitions + 1)))
    rates: dict[str, list[float]] = {"coroutines": [], "threads": [], "one": []}
    shared: list[float] = []
    with open_ledger(emptied(folder), create=True, catalog=catalog) as ledger:
        ledger.create_run(RUN)
        with ledger.writer(RUN, producer="bench") as writer:
            writer.append([version(0, None)])
            for turn in range(repetitions + 1):
                alone = list(itertools.islice(made, each))
                began = time.perf_counter()
                for one in alone:
                    writer.append([one])
                rates["one"].append(each / (time.perf_counter() - began))
                crowd = [list(itertools.islice(made, each)) for _ in range(_WRITERS)]
                took, appends = asyncio.run(_coroutines(writer, crowd))
                rates["coroutines"].append(_WRITERS * each / took)
                crowd = [list(itertools.islice(made, each)) for _ in range(_WRITERS)]
                rates["threads"].append(_WRITERS * each / _threads(writer, crowd))
                if turn:
                    shared.append(_WRITERS * each / appends)
    one = float(np.median(rates["one"][1:]))
    for how in ("coroutines", "threads"):
        rate = float(np.median(rates[how][1:]))
        commits = f", {np.median(shared):.0f} events a commit" if how == "coroutines" else ""
        yield Figure(
            group=GROUP,
            name=f"64 {how}, {name}",
            against="one thread alone",
            ratio=rate / one,
            mb_per_s=rate * _TOKENS * 8 / 1e6,
            note=f"{rate:,.0f} events a second, of {_TOKENS} tokens each{commits}; one thread "
            f"alone {one:,.0f}",
            details={"events_per_s": rate, "one_events_per_s": one},
        )


async def _coroutines(writer: Any, crowd: list[list[SegmentGenerated]]) -> tuple[float, int]:
    """Seconds, and commits."""
    sink = EventSink(writer.append)

    async def one(events: list[SegmentGenerated]) -> None:
        for event in events:
            await sink.append([event])

    began = time.perf_counter()
    await asyncio.gather(*(one(events) for events in crowd))
    took = time.perf_counter() - began
    await sink.close()
    return took, sink.appends


def _threads(writer: Any, crowd: list[list[SegmentGenerated]]) -> float:
    """Seconds."""

    def one(events: list[SegmentGenerated]) -> None:
        for event in events:
            writer.append([event])

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda _: None, range(_WRITERS)))  # the threads are there
        began = time.perf_counter()
        list(pool.map(one, crowd))
        return time.perf_counter() - began
