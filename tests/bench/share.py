"""How much of a training step is spent in the ledger: of a tiny run, and of a recorded one."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ledger import open_ledger
from ledger.encode import events_of, table_to_events
from ledger.events import Event, StepCommitted
from ledger.reader import Reader
from ledger.writer import Writer
from tests.bench.figures import Figure
from tests.bench.samples import emptied

__all__ = ["RecordedStep", "recorded_share", "recorded_steps", "tiny_share"]

GROUP = "share of a step"
_GOAL = 0.01
_STAGES = ("rollout", "select", "train", "publish", "append")


def tiny_share(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """A small real training in this process, with the time inside the ledger's calls added up."""
    from rollout.models.tiny import make_tiny_model
    from trainer.cli import run

    emptied(folder)
    model = make_tiny_model(folder / "model", warmup_steps=25, warmup_lr=1e-2)
    options = {
        "ledger": str(folder / "ledger"),
        "hf_checkpoint": str(model),
        "task": "reasoning_gym:spell_backward",
        "num_rollout": 3 if quick else 8,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 8,
        "micro_batch_size": 8,
        "seq_length": 24,
        "dynamic_sampling_filter_path": "none",
        "lr": 1e-3,
        "save_interval": 1000,
    }
    with _clocked() as spent:
        seconds: dict[str, float] = run(options, show=False)["seconds"]
    with open_ledger(folder / "ledger") as ledger:
        (found,) = ledger.runs()
        steps = events_of(ledger.reader(found.run_id).table("step_committed"), StepCommitted)
    total = sum(seconds.get(stage, 0.0) for stage in _STAGES)
    loading = seconds.get("select", 0.0) + sum(step.data_time_s or 0.0 for step in steps)
    writing = spent["append"]
    yield _figure(
        "ledger, tiny model",
        (writing + loading) / total,
        f"{len(steps)} steps of {1e3 * total / len(steps):.0f} ms: appends "
        f"{1e3 * writing / len(steps):.0f}, select and load {1e3 * loading / len(steps):.0f}; "
        "the step is too short for this to say anything about a real one",
        {"step_s": total / len(steps), "ledger_s": (writing + loading) / len(steps)},
        goal=None,
    )
    yield _digests("digests, tiny model", steps, total)


def _digests(name: str, steps: Sequence[StepCommitted], total_s: float) -> Figure:
    digests = sum(step.digest_time_s or 0.0 for step in steps)
    return _figure(
        name,
        digests / total_s,
        f"{1e3 * digests / len(steps):.0f} ms a step: what a replay is compared by; no work of "
        "the ledger",
        {"digest_s": digests / len(steps), "step_s": total_s / len(steps)},
        goal=None,
    )


def _figure(
    name: str, share: float, note: str, details: dict[str, float], *, goal: float | None = _GOAL
) -> Figure:
    return Figure(
        group=GROUP,
        name=name,
        against="wall time of the step",
        ratio=share,
        goal=goal,
        at_most=True,
        unit="%",
        note=note,
        details=details,
    )


@contextmanager
def _clocked() -> Iterator[dict[str, float]]:
    """Adds up the seconds inside Writer.append while the block runs."""
    spent = {"append": 0.0}
    append = Writer.append

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return append(*args, **kwargs)
        finally:
            spent["append"] += time.perf_counter() - began

    Writer.append = timed  # type: ignore[method-assign]  # restored below: one block is clocked
    try:
        yield spent
    finally:
        Writer.append = append  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a finished run, with everything that was appended for it."""

    step: StepCommitted
    appends: tuple[tuple[Event, ...], ...]
    """Grouped as they were, from the first of its rollout to the step itself."""
    seconds: float | None
    """From the step before to this one; None where an evaluation or a checkpoint lies between."""


def recorded_steps(reader: Reader) -> tuple[list[tuple[Event, ...]], list[RecordedStep]]:
    """What came before the first step, and the steps of a branch; those of one rollout apart."""
    rows: dict[int, dict[str, list[Event]]] = {}
    for kind in reader.kinds():
        table = reader.table(kind)
        if "run_id" in table.column_names and kind == "run_started":
            table = table.drop(["run_id"]).append_column(
                "run_id", table.column("run_id").cast("string")
            )
        events = table_to_events(table)
        at = 0
        for segment in reader.segments(kind):
            taken = events[at : at + segment.rows]
            rows.setdefault(segment.commit_seq, {}).setdefault(kind, []).extend(taken)
            at += len(taken)
    before: list[tuple[Event, ...]] = []
    steps: list[RecordedStep] = []
    pending: list[tuple[Event, ...]] = []
    last: int | None = None
    clean = False
    for seq in sorted(rows):
        events_of_commit = tuple(e for part in rows[seq].values() for e in part)
        kinds = set(rows[seq])
        if kinds & {"run_started", "eval_scored", "checkpoint_saved", "run_resumed"}:
            clean = False
            (pending if steps or pending else before).append(events_of_commit)
            continue
        pending.append(events_of_commit)
        committed = [e for e in events_of_commit if isinstance(e, StepCommitted)]
        if committed:
            now = committed[0].recorded_at or 0
            seconds = (now - last) / 1e6 if clean and last is not None else None
            steps.append(RecordedStep(committed[0], tuple(pending), seconds))
            pending, last, clean = [], now, True
    return before, steps


def recorded_share(source: Path, folder: Path, *, quick: bool) -> Iterator[Figure]:
    """The appends and reads of a finished run done again, against the step times it recorded."""
    copied = emptied(folder) / "source"
    # Opening a ledger writes to its catalog's log; the source stays as it is.
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("checkpoints"))
    with open_ledger(copied) as ledger:
        run_id = ledger.runs()[0].run_id
        before, steps = recorded_steps(ledger.reader(run_id))
    shutil.rmtree(copied)
    repeated = [
        _done_again(folder / f"again-{n}", run_id, before, steps) for n in range(1 if quick else 5)
    ]
    # A cold process reads and writes its first step more slowly; and some steps have no time.
    told = [(i, one.seconds) for i, one in enumerate(steps) if i and one.seconds is not None]
    if not told:
        return
    medians = [
        tuple(statistics.median(again[i][what] for again in repeated) for what in (0, 1))
        for i, _ in told
    ]
    shares = [(w + r) / s for (w, r), (_, s) in zip(medians, told, strict=True)]
    step_s = statistics.median(seconds for _, seconds in told)
    write_s, read_s = (statistics.median(m[what] for m in medians) for what in (0, 1))
    appends = statistics.median(len(steps[i].appends) for i, _ in told)
    name = source.name.removeprefix("ledger-")
    yield _figure(
        f"ledger, {name}",
        statistics.median(shares),
        f"median of {len(told)} recorded steps of {step_s:.1f} s; done again {len(repeated)} "
        f"times: their {appends:g} appends {1e3 * write_s:.0f} ms, select and load "
        f"{1e3 * read_s:.0f} ms; largest share {max(shares):.2%}",
        {"step_s": step_s, "append_s": write_s, "read_s": read_s, "largest": max(shares)},
    )
    yield _digests(
        f"digests, {name}", [steps[i].step for i, _ in told], sum(seconds for _, seconds in told)
    )


def _done_again(
    folder: Path, run_id: str, before: Sequence[tuple[Event, ...]], steps: Sequence[RecordedStep]
) -> list[tuple[float, float]]:
    """Seconds of writing and of reading of each step, in a new ledger."""
    from trainer.batch import load_batch
    from trainer.selection import select_kept

    spent: list[tuple[float, float]] = []
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run(run_id)
        with ledger.writer(run_id, producer="bench") as writer:
            for events in before:
                writer.append(events)
            for one in steps:
                writing = _append_again(writer, one.appends[:-1])
                began = time.perf_counter()
                indices = one.step.indices
                if not one.step.step_in_rollout:
                    select_kept(
                        ledger.reader(run_id),
                        one.step.rollout_step,
                        n_samples=_rollout_samples(steps, one),
                    )
                load_batch(ledger.reader(run_id, branch=None), indices)
                reading = time.perf_counter() - began
                writing += _append_again(writer, one.appends[-1:])
                spent.append((writing, reading))
    return spent


def _rollout_samples(steps: Sequence[RecordedStep], one: RecordedStep) -> int:
    same = [s.step for s in steps if s.step.rollout_step == one.step.rollout_step]
    return sum(len(step.indices) for step in same)


def _append_again(writer: Writer, appends: Sequence[tuple[Event, ...]]) -> float:
    """Seconds of the appends."""
    began = time.perf_counter()
    for events in appends:
        writer.append(events)
    return time.perf_counter() - began
