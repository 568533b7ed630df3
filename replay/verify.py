"""Run recorded steps again and compare every bit; name the first difference.

The scope is a path of versions on one branch. It starts from the checkpoint nearest before the
first version of the scope; every checkpoint on the way is compared with its record, and every step
is run again with its own recorded settings on its own recorded samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ledger.canonical import canonical_json
from ledger.errors import Corrupt, InvalidArgument, NotFound, explain
from ledger.store import Ledger
from trainer.history import History, read_history
from trainer.ranks import by_writer, data_parallel_size
from trainer.restore import StepAgain, check_checkpoint, load_version, replay_steps
from trainer.settings import ParallelSettings, layout_record
from trainer.step_models import ModelLibrary, model_places
from trainer.stepping import recorded_settings

__all__ = ["Verdict", "VerifyReport", "plan_scope", "verify_branch"]


RECORDED_ONLY = "recorded only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of one version."""

    weight_version: int
    step: int | None
    """The step that made it; None for a run's first version."""
    kind: str
    """'step' (run again), 'checkpoint' (its bytes compared), or 'recorded only' (a step that cannot
    be run again in this process)."""
    reproduced: bool
    detail: str
    """The first difference where there is one; else what was found equal."""
    quantity: str = ""
    where: str = ""
    expected: str = ""
    found: str = ""


@dataclass(slots=True)
class VerifyReport:
    """The verdicts of a branch, in order; the last one is the first divergence, if there is any."""

    run_id: str
    branch: str
    start_version: int
    """The version whose checkpoint the replay started from."""
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def reproduced(self) -> bool:
        """Whether all that was compared is as recorded; without `steps`, a checkpoint's files."""
        return all(verdict.reproduced for verdict in self.verdicts)

    @property
    def steps(self) -> int:
        """Steps that were run again."""
        return sum(verdict.kind == "step" for verdict in self.verdicts)

    @property
    def recorded_only(self) -> int:
        """Steps in scope that could not be run again here."""
        return sum(verdict.kind == RECORDED_ONLY for verdict in self.verdicts)

    @property
    def diverged(self) -> bool:
        """Whether something that was compared is not as recorded."""
        return any(v.kind != RECORDED_ONLY and not v.reproduced for v in self.verdicts)


def plan_scope(
    history: History, head: int, *, from_version: int | None, to_version: int | None
) -> list[int]:
    """The versions to verify: from a version with a checkpoint to the last one asked for.

    `from_version` is the version whose state the first step in scope starts from (default: the
    run's first); `to_version` the last version to reproduce (default: `head`). Raises NotFound for
    a version that does not lie on the path to `head`, InvalidArgument for an empty scope.
    """
    path = history.path(head)
    for name, version in (("--from-version", from_version), ("--to-version", to_version)):
        if version is not None and version not in path:
            raise NotFound(
                explain(
                    "choosing what to verify",
                    on=f"{name} {version}",
                    expected=f"a version on the way to {head}: {_spans(path)}",
                    found=version,
                    do="choose the branch with --branch; `ledger log` draws the tree",
                )
            )
    last = head if to_version is None else to_version
    first = path[0] if from_version is None else from_version
    if path.index(first) > path.index(last):
        raise InvalidArgument(
            explain(
                "choosing what to verify",
                expected="--from-version at or before --to-version",
                found=f"{first} and {last}",
            )
        )
    start = history.from_checkpoint(first)[0]
    return path[path.index(start) : path.index(last) + 1]


def verify_branch(
    ledger: Ledger,
    run_id: str,
    branch: str,
    *,
    parallel: ParallelSettings,
    seed: int,
    from_version: int | None = None,
    to_version: int | None = None,
    places: Mapping[str, Any] | None = None,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> VerifyReport:
    """Verify the steps of a branch and of what it forked from; stops at the first divergence.

    Every rank calls it alike and gets the same report. Steps that were taken in another layout than
    that of this process's ranks are recorded only; what follows them is run again from the next
    checkpoint in scope.

    The process groups must have been started with the thread count and determinism that the branch
    recorded (see `replay.surroundings`). Where no step is in scope, only the checkpoint's bytes are
    compared with their record. `places` (`ref_load`, `opd_teacher_load`, `critic_load`) says where
    models are that moved since they were recorded. `tell` gets each verdict as it is reached.
    Raises NotFound where the start's checkpoint is gone.
    """
    history = read_history(ledger, run_id)
    info = ledger.branch(run_id, branch)
    head = history.head(branch, info.fork_version)
    versions = plan_scope(history, head, from_version=from_version, to_version=to_version)
    report = VerifyReport(run_id=run_id, branch=branch, start_version=versions[0])

    def add(verdict: Verdict) -> bool:
        report.verdicts.append(verdict)
        tell(verdict)
        return verdict.reproduced or verdict.kind == RECORDED_ONLY

    start, *following = versions
    if not add(_check(ledger, history, start)):
        return report
    library = ModelLibrary(
        ledger=ledger,
        history=history,
        parallel=parallel,
        places=model_places(places or {}, ledger, run_id),
        seed=seed,
    )
    made_start = history.steps.get(start)
    if not following and made_start is not None:
        optimizer = recorded_settings(made_start).optimizer
        load_version(ledger, history, start, parallel=parallel, optimizer=optimizer, seed=seed)
    for stretch in _stretches(history, start, following, _layout(parallel)):
        if stretch.reason:
            (version,) = stretch.versions
            add(_recorded_only(history, version, stretch.reason))
            if version in history.checkpoints and not add(_check(ledger, history, version)):
                return report
            continue
        first_step = history.steps[stretch.versions[0]]
        state = load_version(
            ledger,
            history,
            stretch.start,
            parallel=parallel,
            optimizer=recorded_settings(first_step).optimizer,
            seed=seed,
        )
        for again in replay_steps(state, ledger, history, stretch.versions, library=library):
            made = again.recorded.weight_version_out
            if not add(_of_step(history, again)):
                return report
            if made in history.checkpoints and not add(_check(ledger, history, made)):
                return report
    return report


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Versions that follow each other and are run again from one state, or one that is not."""

    start: int
    versions: list[int]
    reason: str = ""
    """Why its one version is recorded only."""


def _stretches(
    history: History, start: int, following: Sequence[int], here: dict[str, Any]
) -> Iterator[_Stretch]:
    """What of `following` can be run again in the layout `here`, in order."""
    at: int | None = start
    running: list[int] = []
    first = start
    for version in following:
        recorded = json.loads(history.steps[version].layout)
        reason = ""
        if recorded != here:
            reason = f"taken in the layout {_shown(recorded)}; here {_shown(here)}"
        elif at is None:
            reason = "no checkpoint between it and a step of another layout before it"
        if not reason:
            if not running and at is not None:
                first = at
            running.append(version)
            continue
        if running:
            yield _Stretch(first, running)
            running = []
        yield _Stretch(version, [version], reason)
        at = version if version in history.checkpoints else None
    if running:
        yield _Stretch(first, running)


def _layout(parallel: ParallelSettings) -> dict[str, Any]:
    """The layout of this process's ranks, as a step records it."""
    layout: dict[str, Any] = json.loads(
        canonical_json(
            {"parallel": layout_record(parallel), "data_parallel_size": data_parallel_size()}
        )
    )
    return layout


def _shown(layout: dict[str, Any]) -> str:
    sizes = {**layout["parallel"], "data_parallel_size": layout["data_parallel_size"]}
    said = [f"{name} {size}" for name, size in sorted(sizes.items()) if size not in (None, 1)]
    return ", ".join(said) or "of one rank"


def _recorded_only(history: History, version: int, reason: str) -> Verdict:
    return Verdict(
        weight_version=version,
        step=history.steps[version].step,
        kind=RECORDED_ONLY,
        reproduced=False,
        detail=reason,
        quantity="layout",
    )


def _of_step(history: History, again: StepAgain) -> Verdict:
    made, difference = again.recorded.weight_version_out, again.divergence
    if difference is None:
        root = history.weights[made].root.hex()
        return Verdict(
            weight_version=made,
            step=again.recorded.step,
            kind="step",
            reproduced=True,
            detail=f"weights {root[:16]}…, optimizer, gradients, log-probs and loss "
            f"{again.recorded.loss!r}: every bit as recorded",
        )
    return Verdict(
        weight_version=made,
        step=again.recorded.step,
        kind="step",
        reproduced=False,
        detail=str(difference),
        quantity=difference.quantity,
        where=difference.where,
        expected=difference.expected,
        found=difference.found,
    )


def _check(ledger: Ledger, history: History, version: int) -> Verdict:
    """Compare a checkpoint with its record."""
    event = history.checkpoints[version]
    try:
        folder = by_writer(lambda: check_checkpoint(ledger, history, version))
    except (Corrupt, NotFound) as error:
        return Verdict(
            weight_version=version,
            step=event.step,
            kind="checkpoint",
            reproduced=False,
            detail=str(error),
            quantity="checkpoint",
        )
    return Verdict(
        weight_version=version,
        step=event.step,
        kind="checkpoint",
        reproduced=True,
        detail=f"{len(event.files)} files in {folder}: every byte as recorded",
    )


def _spans(versions: Sequence[int]) -> str:
    """1, 2, 3, 7 as '1–3, 7'."""
    parts: list[list[int]] = []
    for version in versions:
        if parts and version == parts[-1][-1] + 1:
            parts[-1].append(version)
        else:
            parts.append([version])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
