"""A ledger that has grown: opening it, asking it, and following it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from blake3 import blake3

from ledger import Ledger, open_ledger
from ledger.compact import compact, plan_compaction
from ledger.events import SampleScored, WeightsPublished
from ledger.follow import events_after
from tests.bench.child import in_new_process
from tests.bench.episodes import make_step, text, version
from tests.bench.figures import Figure
from tests.bench.samples import RUN, linked_copy, new_ledger, scored

__all__ = ["grown_figures"]

GROUP = "a grown ledger"
_SAMPLES = 128
_RESPONSE = 64
"""Tokens of a response: few, since rows, commits and files are what opening costs."""
_NEW = 10


def grown_figures(folder: Path, cache: Path, *, quick: bool) -> Iterator[Figure]:
    """Open and ask a training of many steps; follow ledgers of few and of many commits."""
    steps = 100 if quick else 1000
    cache = _of_this_code(cache)
    training = _kept(cache / f"steps-{steps}", lambda new: _train(new, steps))
    yield from _asked(f"{steps:,} steps × {_SAMPLES} samples, hot", training, 1 if quick else 3)
    sealed = _kept(cache / f"steps-{steps}-sealed", lambda new: _seal(training, new))
    yield from _asked(f"the same {steps:,} steps, sealed", sealed, 1 if quick else 3)
    few, many = (100, 1000) if quick else (100, 10_000)
    folder.mkdir(parents=True, exist_ok=True)
    ledgers: dict[int, Path] = {}
    for commits in (few, many):
        made = _kept(cache / f"commits-{commits}", lambda new, n=commits: _commit(new, n))  # type: ignore[misc]
        ledgers[commits] = linked_copy(made, folder / f"{commits}")
    yield from _followed(ledgers, few, many, 5 if quick else 15)


def _of_this_code(cache: Path) -> Path:
    """A folder for what this code writes; what other code wrote there is removed."""
    here = Path(__file__)
    sources = [*sorted((here.parents[2] / "ledger").rglob("*.py")), here]
    sources += [here.with_name("episodes.py"), here.with_name("samples.py")]
    key = blake3(b"".join(source.read_bytes() for source in sources)).hexdigest(length=8)
    for other in cache.iterdir() if cache.is_dir() else ():
        if other.name != key:
            shutil.rmtree(other)
    return cache / key


def _kept(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made first where an earlier run has not made it."""
    if not target.is_dir():
        unfinished = target.with_name(f".{target.name}-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(target)
    return target


def _train(folder: Path, steps: int) -> None:
    """Two processes append every other step each; each step is four commits, as a training's are.

    The versions are published before, so that no process waits for the other.
    """
    with new_ledger(folder) as (_, writer):
        writer.append([version(number + 1, number) for number in range(steps)])
    _in_two_processes(_steps, folder, steps)


def _steps(folder: Path, which: int, steps: int) -> None:
    random = np.random.default_rng(which)
    source = text(1 << 14, random)
    with open_ledger(folder) as ledger, ledger.writer(RUN, producer=f"process-{which}") as writer:
        for number in range(which, steps, 2):
            step = make_step(number, source, random, samples=_SAMPLES, response=_RESPONSE)
            for events in step.appends():
                writer.append([e for e in events if not isinstance(e, WeightsPublished)])


def _seal(hot: Path, folder: Path) -> None:
    linked_copy(hot, folder)
    with open_ledger(folder) as ledger:
        compact(ledger, plan_compaction(ledger))


def _commit(folder: Path, commits: int) -> None:
    with new_ledger(folder) as (_, writer), ThreadPoolExecutor(32) as pool:
        for done in [pool.submit(writer.append, [scored(number)]) for number in range(commits)]:
            done.result()


def _in_two_processes(function: Callable[[Path, int, int], None], folder: Path, count: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for done in [pool.submit(function, folder, which, count) for which in (0, 1)]:
            done.result()


def _asked(name: str, ledger: Path, repetitions: int) -> Iterator[Figure]:
    taken = [in_new_process("query", ledger, RUN) for _ in range(repetitions)]
    one = {key: statistics.median(t[key] for t in taken) for key in taken[0]}
    with open_ledger(ledger) as opened:
        segments = opened.segment_infos(RUN)
    files = {s.file.path: s.file.size_bytes for s in segments if s.file is not None}
    yield Figure(
        group=GROUP,
        name=f"{name}: opens, answers the first question",
        against="a new process",
        ratio=one["first_s"],
        goal=1.0,
        at_most=True,
        unit="s",
        note=f"the last ten steps; CPU {one['first_cpu_s']:.2f} s; opening "
        f"{1e3 * one['open_s']:.0f} ms of it; imports {one['imports_s']:.2f} s apart; ledger of "
        f"{sum(files.values()) / 1e6:.0f} MB, {len(segments):,} segments in {len(files):,} files; "
        f"peak memory {one['first_peak_bytes'] / 1e6:.0f} MB",
        details=one,
    )
    yield Figure(
        group=GROUP,
        name=f"{name}: the next question",
        against="",
        ratio=one["second_s"],
        unit="s",
        note="mean reward by step over all samples; peak memory "
        f"{one['peak_bytes'] / 1e6:.0f} MB, mapped files included",
        details=one,
    )


def _followed(ledgers: dict[int, Path], few: int, many: int, repetitions: int) -> Iterator[Figure]:
    """What ten new commits cost a follower, and a reader whose table was up to date."""
    kind = SampleScored.KIND
    ways: dict[str, Callable[[Ledger, int], int]] = {
        "following": lambda ledger, since: sum(
            new.table.num_rows
            for new in events_after(ledger, RUN, since, kinds=[kind])
            if new.table is not None
        ),
        "a reader's table of": lambda ledger, _: ledger.reader(RUN).table(kind).num_rows,
    }
    taken: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        opened = {
            n: [stack.enter_context(open_ledger(folder)) for _ in range(2)]
            for n, folder in ledgers.items()
        }
        for turn in range(repetitions + 1):
            for n, (reading, writing) in opened.items():
                rows, since = reading.reader(RUN).table(kind).num_rows, reading.run(RUN).head_seq
                with writing.writer(RUN, producer=f"follow-{turn}") as writer:
                    for i in range(_NEW):
                        writer.append([scored(rows + i)])
                for way, look in ways.items():
                    began = time.perf_counter()
                    found = look(reading, since)
                    if turn:
                        taken.setdefault((way, n), []).append(time.perf_counter() - began)
                    if found not in (_NEW, rows + _NEW):
                        raise RuntimeError(f"{way}: {found} rows, of {rows} and {_NEW} new ones")
    for way in ways:
        less, more = (1e3 * statistics.median(taken[way, n]) for n in (few, many))
        yield Figure(
            group=GROUP,
            name=f"{way} {_NEW} new commits among {many:,}",
            against=f"the same among {few:,}",
            ratio=more / less,
            goal=1.5,
            at_most=True,
            note=f"time ÷ time: {more:.1f} ms against {less:.1f}; 1 is a cost by what is new alone",
            details={"many_s": more / 1e3, "few_s": less / 1e3},
        )
