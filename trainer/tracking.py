"""Metrics of committed events, sent to TensorBoard and Weights & Biases when asked.

The ledger is the truth and a sink is a copy of it: a sink is fed from events after they are
committed, and when a process starts, whatever the sink lacks of the branch is sent from the ledger.
So a run that is killed and goes on leaves neither a hole nor a step twice.

A sink that cannot be opened is refused before training begins. One that fails later is closed, said
on standard error at once and in the command's result, and training goes on: the next process fills
the sink from the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from ledger.encode import events_of
from ledger.errors import InvalidArgument, LedgerError, explain
from ledger.events import EvalScored, StepCommitted
from trainer.tracking_sinks import Sink, TensorBoardSink, WandbSink

if TYPE_CHECKING:
    from ledger.store import Ledger
    from trainer.history import History

__all__ = ["Row", "Tracker", "check_tracking", "open_tracker", "row_of_evaluation", "row_of_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Some numbers at one place of the horizontal axis."""

    step: int
    """`train/*`: the optimizer step, from 0. `eval/*`: optimizer steps behind the version."""
    values: Mapping[str, float]
    at_s: float | None
    """When the event was recorded, seconds since 1970; None where it does not say."""


def row_of_step(event: StepCommitted) -> Row:
    """`train/<metric>` for each metric of the step, and `perf/…` for what was measured of it."""
    values = {
        f"train/{name}": float(value)
        for name, value in zip(event.metric_names, event.metric_values, strict=True)
    }
    values["rollout/step"] = float(event.rollout_step)
    values["perf/trained_tokens"] = float(event.trained_tokens)
    for name in ("data_time_s", "train_time_s", "digest_time_s"):
        seconds = getattr(event, name)
        if seconds is not None:
            values[f"perf/{name}"] = float(seconds)
    return Row(step=int(event.step), values=values, at_s=_seconds(event.recorded_at))


def row_of_evaluation(event: EvalScored, steps: int) -> Row:
    """`eval/<name>`, at the number of optimizer steps behind the version that was measured."""
    values = {f"eval/{event.name}": float(event.mean_reward)}
    return Row(step=steps, values=values, at_s=_seconds(event.recorded_at))


def _seconds(recorded_at: int | None) -> float | None:
    return None if recorded_at is None else recorded_at / 1e6


@dataclass(slots=True)
class Tracker:
    """Hands the metrics of events to sinks; each tag of each step at most once."""

    sinks: list[Sink]
    tell: Callable[[str], None]
    """Hears of a sink that failed."""
    failures: dict[str, str] = field(default_factory=dict)
    """Sink → why it was closed; what it lacks is in the ledger."""
    steps_of: dict[int, int] = field(default_factory=dict)
    """Weight version → optimizer steps behind it; 0 where it is not in here."""

    def committed(self, event: StepCommitted | EvalScored) -> None:
        """Send an event that is in the ledger. Never raises: training must not end by it."""
        if isinstance(event, StepCommitted):
            self.steps_of[event.weight_version_out] = event.step + 1
            row = row_of_step(event)
        else:
            row = row_of_evaluation(event, self.steps_of.get(event.weight_version, 0))
        for sink in list(self.sinks):
            new = {tag: v for tag, v in row.values.items() if sink.last.get(tag, -1) < row.step}
            if not new:
                continue
            try:
                sink.write(row.step, new, row.at_s)
            except Exception as error:  # a foreign package may raise anything, or lose its server
                self._drop(sink, f"at step {row.step}: {type(error).__name__}: {error}")
            else:
                sink.last.update(dict.fromkeys(new, row.step))

    def close(self) -> None:
        """Flush and close every sink. Never raises."""
        for sink in list(self.sinks):
            self._close(sink)
        self.sinks.clear()

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # as above
            self.failures.setdefault(sink.name, f"closing: {type(error).__name__}: {error}")
            self.tell(f"{sink.name} could not be closed: {error}")

    def _drop(self, sink: Sink, why: str) -> None:
        self.failures[sink.name] = why
        self.sinks.remove(sink)
        self._close(sink)
        self.tell(
            explain(
                "sending metrics",
                on=sink.name,
                found=why,
                do="training goes on without it; the metrics are in the ledger, and the same "
                "command sends what is missing when it is started again",
            )
        )

    def catch_up(self, events: Iterable[StepCommitted | EvalScored]) -> None:
        """Send what the sinks lack of the events recorded so far, in the order given."""
        for event in events:
            self.committed(event)


def check_tracking(values: Mapping[str, Any], root: Path | None) -> None:
    """Refuse what cannot work before anything is written.

    Raises MissingDependency where a package is missing; InvalidArgument where no folder was named
    and the ledger is in none.
    """
    if values["use_tensorboard"]:
        TensorBoardSink.require()
        _folder(values, "tensorboard_dir", root)
    if values["use_wandb"]:
        WandbSink.require()
        _folder(values, "wandb_dir", root)


def open_tracker(
    values: Mapping[str, Any],
    *,
    ledger: Ledger,
    run_id: str,
    branch: str,
    history: History,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Tracker:
    """The sinks that the options ask for, brought up to what the ledger holds of the branch.

    `settings` are the content options as recorded (secrets redacted), which W&B shows beside a run.

    Raises what `check_tracking` raises, and StorageFailed or InvalidArgument where a sink cannot be
    opened.
    """
    check_tracking(values, ledger.root)
    sinks: list[Sink] = []
    try:
        if values["use_tensorboard"]:
            folder = _folder(values, "tensorboard_dir", ledger.root)
            sinks.append(TensorBoardSink(folder / _safe(run_id) / _safe(branch)))
        if values["use_wandb"]:
            sinks.append(
                WandbSink(
                    _folder(values, "wandb_dir", ledger.root),
                    project=values["wandb_project"],
                    group=values["wandb_group"] or run_id,
                    team=values["wandb_team"],
                    mode=values["wandb_mode"] or "online",
                    name=f"{run_id}/{branch}",
                    # Unique to the run: its first link covers seeds, settings and environment.
                    identity=f"{_first_link(ledger, run_id)}/{branch}",
                    settings=settings,
                )
            )
    except LedgerError:
        for sink in sinks:
            sink.close()
        raise
    behind = {version: step.step + 1 for version, step in history.steps.items()}
    tracker = Tracker(sinks, tell, steps_of=behind)
    if sinks:
        tracker.catch_up(_recorded(ledger, run_id, branch, history))
    return tracker


def _recorded(
    ledger: Ledger, run_id: str, branch: str, history: History
) -> Sequence[StepCommitted | EvalScored]:
    """The branch's own steps in order, each followed by the evaluations of the version it made."""
    steps = sorted(
        (s for v, s in history.steps.items() if history.branch_of[v] == branch),
        key=lambda step: step.step,
    )
    table = ledger.reader(run_id, branch).table("eval_scored")
    mine = table.filter(pc.equal(table["branch"], branch))
    evaluations = events_of(mine, EvalScored)
    events: list[StepCommitted | EvalScored] = [*steps, *evaluations]

    def place(event: StepCommitted | EvalScored) -> tuple[int, bool]:
        if isinstance(event, StepCommitted):
            return event.step + 1, False
        made = history.steps.get(event.weight_version)
        return (0 if made is None else made.step + 1), True

    return sorted(events, key=place)


def _first_link(ledger: Ledger, run_id: str) -> str:
    """What tells this run from every other: when its first event was recorded, and its digest."""
    (started,) = (
        ledger.reader(run_id, branch=None)
        .table("run_started", ["model_digest", "recorded_at"])
        .to_pylist()[:1]
    )
    return f"{run_id}/{started['model_digest'].hex()}/{started['recorded_at']}"


def _folder(values: Mapping[str, Any], name: str, root: Path | None) -> Path:
    if values[name]:
        return Path(values[name])
    if root is None:
        flag = "--" + name.replace("_", "-")
        raise InvalidArgument(
            explain(
                "where metrics are to be written was not said",
                on=flag,
                expected="a folder: this ledger is in none",
                found="nothing",
                do=f"give {flag}",
            )
        )
    return root / ("tensorboard" if name == "tensorboard_dir" else "wandb-files")


def _safe(name: str) -> str:
    """A name as one path component."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", name) or "-"
