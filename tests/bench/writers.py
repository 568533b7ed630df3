"""Many writers of small commits: threads that share a writer, and processes that share a run."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ledger import open_ledger
from ledger.events import SampleScored
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import RUN, emptied, new_ledger, scored, segment_files, write_durably

__all__ = ["writer_figures"]

GROUP = "many writers"
_THREADS = 64
_PROCESSES = 4


def writer_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """One event a commit, from 64 threads at once and from 4 processes at once."""
    yield _threads(folder / "threads", 2 if quick else 10, 2 if quick else 7)
    yield _processes(folder / "processes", 10 if quick else 50, 2 if quick else 5)


def _threads(folder: Path, each: int, repetitions: int) -> Figure:
    number = itertools.count()
    with (
        new_ledger(emptied(folder)) as (_, writer),
        ThreadPoolExecutor(_THREADS) as pool,
    ):

        def commit(_: int = 0) -> None:
            writer.append([scored(next(number))])

        alone, together = 2 * each, _THREADS * each
        times = interleaved(
            {
                "one": lambda: [commit() for _ in range(alone)],
                "many": lambda: list(pool.map(commit, range(together))),
            },
            repetitions,
        )
    one, many = times["one"].seconds / alone, times["many"].seconds / together
    return Figure(
        group=GROUP,
        name=f"group commit, {_THREADS} threads",
        against="the rate of one thread",
        ratio=one / many,
        goal=14.0,
        note=f"{1 / many:,.0f} commits a second against {1 / one:,.0f}; CPU "
        f"{1e3 * times['many'].cpu_seconds / together:.2f} ms a commit against "
        f"{1e3 * times['one'].cpu_seconds / alone:.2f}",
        details={"many_s": many, "one_s": one},
    )


def _processes(folder: Path, each: int, repetitions: int) -> Figure:
    emptied(folder)
    with new_ledger(folder / "ledger") as (ledger, writer):
        writer.append([scored(0)])
        (file,) = segment_files(ledger, SampleScored.KIND)
        stored = file.read_bytes()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(_PROCESSES), context.Queue()
    processes = [
        context.Process(
            target=_one_process,
            args=(folder, which, stored, each, repetitions, barrier, results),
        )
        for which in range(_PROCESSES)
    ]
    for process in processes:
        process.start()
    taken = [_result(results, processes) for _ in processes]
    for process in processes:
        process.join()
    with open_ledger(folder / "ledger") as ledger:
        found = ledger.reader(RUN).table(SampleScored.KIND, ["seq"]).num_rows
    wanted = 1 + _PROCESSES * each * (repetitions + 1)
    if found != wanted:
        raise RuntimeError(f"{found} commits are there, {wanted} were acknowledged")
    raw, own = (
        statistics.median(t for turns in taken for t in turns[name]) / each
        for name in ("raw", "ledger")
    )
    return Figure(
        group=GROUP,
        name=f"{_PROCESSES} processes at once, each",
        against=f"{_PROCESSES} processes' fsynced files",
        ratio=raw / own,
        goal=0.75,
        note=f"{1 / own:,.0f} commits a second and process against {1 / raw:,.0f}; none failed, "
        "none is missing",
        details={"ledger_s": own, "raw_s": raw},
    )


def _result(results: Any, processes: Sequence[Any]) -> dict[str, list[float]]:
    """What one of the processes measured. Raises RuntimeError where one failed."""
    while True:
        try:
            measured: dict[str, list[float]] = results.get(timeout=1)
            return measured
        except queue.Empty:
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                raise RuntimeError(f"writing processes ended with {failed}") from None


def _one_process(
    folder: Path,
    which: int,
    stored: bytes,
    each: int,
    repetitions: int,
    barrier: Barrier,
    results: Any,
) -> None:
    raw = emptied(folder / f"raw-{which}")
    number = itertools.count()
    taken: dict[str, list[float]] = {"raw": [], "ledger": []}
    with (
        open_ledger(folder / "ledger") as ledger,
        ledger.writer(RUN, producer=f"{which}") as writer,
    ):
        things: dict[str, Callable[[], Any]] = {
            "raw": lambda: write_durably(raw, f"{next(number)}", [stored]),
            "ledger": lambda: writer.append([scored(next(number))]),
        }
        for turn in range(repetitions + 1):
            for name, thing in things.items():
                barrier.wait(timeout=120)
                began = time.perf_counter()
                for _ in range(each):
                    thing()
                if turn:
                    taken[name].append(time.perf_counter() - began)
    results.put(taken)
