"""Reading everything again: the catalog, every segment, links, the files of every checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.integrity import catalog_differences
from ledger.catalog.queries import list_runs as runs_of
from ledger.errors import InvalidArgument, NotFound, explain
from ledger.events import CheckpointSaved
from ledger.finding import Finding, as_text
from ledger.links import last_told, run_object
from ledger.mark import MARK, read_mark
from ledger.placement import StoredRun, list_runs
from ledger.verify_checkpoints import compare_checkpoint
from ledger.verify_files import Outcome, by_file, check_file, in_parallel
from ledger.verify_run import RunCheck, RunState
from ledger.verify_store import check_links, check_unnamed, check_waiting

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Finding", "VerifyReport", "verify_ledger"]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome: everything that was read, and all that is wrong."""

    runs: int
    commits: int
    segments: int
    rows: int
    size_bytes: int
    """Of the segments."""
    checkpoints: int | None
    """Checkpoints whose files were compared; None where they were left out."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What is not wrong, but worth knowing: links that are not written yet, files of appends that
    were never committed, retired rows."""
    head: str | None = None
    """How the run stands to the head that was given: 'equal' or 'extends'; None where none was
    given, or (with a finding) where it contradicts it."""

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """For `--json`: totals and findings."""
        return dataclasses.asdict(self) | {"ok": self.ok}

    def lines(self) -> list[str]:
        """For a reader: every finding, then the totals."""
        checkpoints = (
            "no checkpoint compared (left out)"
            if self.checkpoints is None
            else f"{self.checkpoints} checkpoints"
        )
        totals = (
            f"{self.runs} runs, {self.commits} commits, {self.segments} segments, "
            f"{self.rows} events, {self.size_bytes} bytes, {checkpoints}"
        )
        verdict = "all as committed" if self.ok else f"{len(self.findings)} findings"
        made = [line for f in self.findings for line in str(f).splitlines()]
        made += [f"note: {note}" for note in self.notes]
        if self.head is not None:
            made.append(
                "the head that was given is the run's head"
                if self.head == "equal"
                else "the run extends the head that was given"
            )
        return [*made, f"{totals}: {verdict}"]


def verify_ledger(
    ledger: Ledger,
    run_id: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    checkpoints: bool = True,
    head: tuple[int, bytes] | None = None,
    threads: int | None = None,
) -> VerifyReport:
    """Check the catalog and all its rows, files, logical hashes, the chain, links, checkpoints.

    Of one run, or of all. The catalog comes first: where it is damaged as a database, that is what
    is reported, and nothing else is compared with it. What the events do not repeat (times, epochs
    without commits, the ledger's id) is compared with the links and objects beside the data, as far
    as those are written. Files are read by `threads` at once (default: by the machine, at most 8).

    `checkpoints=False` leaves out the files of checkpoints, which may be large, or kept elsewhere.
    `head` (seq, chain) is a head of the run that was kept elsewhere: it is a finding where the
    run does not extend it.

    `progress(done, total)` is called after each segment and each checkpoint. Nothing is changed,
    nothing is raised for what is found: a report lists it all. Writers may go on meanwhile.

    Raises:
        NotFound: no such run.
        InvalidArgument: a head without a run, where there are several.
        StorageFailed: the store or the catalog cannot be read at all.
    """
    damage = [
        Finding(None, f"the catalog, {ledger.catalog.name}", what, expected, found)
        for what, expected, found in catalog_differences(ledger.catalog)
    ]
    if damage:
        return VerifyReport(0, 0, 0, 0, 0, None, tuple(damage))
    runs = [ledger.run(run_id)] if run_id is not None else ledger.runs()
    if head is not None and len(runs) != 1:
        raise InvalidArgument(
            explain(
                "a head was not compared", expected="one run", found=[run.run_id for run in runs]
            )
        )
    states = []
    for run in runs:
        with ledger.catalog.read() as connection:
            states.append(RunState.read(connection, run.run_id))
    stored = {run.run_id: run for run in list_runs(ledger.store)}
    with ledger.catalog.read() as connection:
        heads = {run.run_id: run.head_seq for run in runs_of(connection)}
        epochs: dict[str, dict[str, int]] = {run_id: {} for run_id in heads}
        for row in connection.execute(sa.select(t.producers)):
            epochs.setdefault(row.run_id, {})[row.producer] = row.epoch
    total = sum(len(state.segments) + (state.saved if checkpoints else 0) for state in states)
    count = _Progress(progress, total)
    findings: list[Finding] = []
    notes: list[str] = []
    said: str | None = None
    for state in states:
        name = state.run.run_id
        outcomes = _read_files(ledger, state, threads, count)
        check = RunCheck(state, outcomes)
        check.run()
        there = stored.get(name, StoredRun(name, (), (), frozenset(), frozenset(), ()))
        notes += check_links(
            ledger.store,
            ledger.ledger_id,
            state,
            there,
            heads.get(name, 0),
            epochs.get(name, {}),
            check.find,
        )
        check_waiting(ledger.store, state, there, check.find)
        notes += check_unnamed(ledger.store, state, there, check.find)
        gone = sum(s.rows for s in state.segments if s.file is None)
        if gone:
            notes.append(f"run {name!r}: {gone} rows are retired, by events that say so")
        if head is not None:
            said = _compare_head(state, head, check.find)
        if checkpoints:
            _check_checkpoints(ledger, state, outcomes, threads, count, check.find)
        findings += check.findings
    if run_id is None:
        _check_unknown_runs(ledger, stored.values(), heads, findings, notes)
    _check_mark(ledger, stored.values(), findings)
    sizes = {s.file.path: s.file.size_bytes for state in states for s in state.segments if s.file}
    return VerifyReport(
        runs=len(runs),
        commits=sum(len(state.commits) for state in states),
        segments=sum(len(state.segments) for state in states),
        rows=sum(s.rows for state in states for s in state.segments),
        size_bytes=sum(sizes.values()),
        checkpoints=sum(state.saved for state in states) if checkpoints else None,
        findings=tuple(findings),
        notes=tuple(notes),
        head=said,
    )


def _check_unknown_runs(
    ledger: Ledger,
    stored: Iterable[StoredRun],
    known: Collection[str],
    findings: list[Finding],
    notes: list[str],
) -> None:
    """Runs that are in the store, but not in the catalog, which was read after the store."""
    for run in stored:
        if run.run_id in known:
            continue
        if run.links:
            where, expected = f"runs/{run.run_id}", "a run that the catalog has, or no links"
            found = f"links up to seq {max(map(last_told, run.links))}"
            findings.append(Finding(run.run_id, where, "the run", expected, found))
        else:
            notes.append(f"run {run.run_id!r}: objects in the store, but it was never begun")


def _check_mark(ledger: Ledger, stored: Iterable[StoredRun], findings: list[Finding]) -> None:
    """Whatever notes runs beside the data has marked the ledger before."""
    noted = any(run_object(run.run_id) in run.others for run in stored)
    if noted and read_mark(ledger.store) is None:
        expected = f"the mark of ledger {ledger.ledger_id}"
        findings.append(Finding(None, MARK, "the object", expected, "none"))


class _Progress:
    def __init__(self, report: Callable[[int, int], None] | None, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._done += 1
            if self._report is not None:
                self._report(self._done, self._total)


def _read_files(
    ledger: Ledger, state: RunState, threads: int | None, count: _Progress
) -> dict[int, Outcome]:
    """First seq → what reading the segment told, of all that lie in a file."""
    wrote = state.writers()
    files = by_file(state.segments)
    count.advance(sum(s.file is None for s in state.segments))
    outcomes: dict[int, Outcome] = {}
    tasks = (functools.partial(check_file, ledger.store, segments, wrote) for segments in files)
    for made in in_parallel(tasks, threads):
        outcomes |= {s.first_seq: outcome for s, outcome in made}
        count.advance(len(made))
    return outcomes


def _check_checkpoints(
    ledger: Ledger,
    state: RunState,
    outcomes: dict[int, Outcome],
    threads: int | None,
    count: _Progress,
    find: Callable[[str, str, object, object], None],
) -> None:
    """The files of every recorded checkpoint."""

    def tasks() -> Iterator[Callable[[], list[tuple[str, str, object, object]]]]:
        for s in state.segments:
            outcome = outcomes.get(s.first_seq)
            for event in () if outcome is None else outcome.checkpoints:
                yield functools.partial(_compare_checkpoint, ledger, s.branch, event)

    compared = 0
    for differences in in_parallel(tasks(), threads):
        for difference in differences:
            find(*difference)
        compared += 1
        count.advance(1)
    # Of those whose event could not be read it is said already.
    count.advance(state.saved - compared)


def _compare_checkpoint(
    ledger: Ledger, branch: str, event: CheckpointSaved
) -> list[tuple[str, str, object, object]]:
    of = f"checkpoint of version {event.weight_version} on branch {branch!r}"
    try:
        folder = ledger.locate(event.location)
    except NotFound:
        return [(of, "its folder", "an absolute path", event.location)]
    return [(f"{of}, {folder}", *found) for found in compare_checkpoint(folder, event)]


def _compare_head(
    state: RunState, head: tuple[int, bytes], find: Callable[[str, str, object, object], None]
) -> str | None:
    """How the run stands to a head that was kept elsewhere."""
    seq, chain = head
    where, what = f"the head that was given, seq {seq}", "the chain there"
    if seq == 0:
        return "equal" if state.run.head_seq == 0 else "extends"
    if seq > state.run.head_seq:
        find(where, what, as_text(chain), f"the run ends at seq {state.run.head_seq}")
        return None
    at = next((c for c in state.commits if c.last_seq == seq), None)
    if at is None or at.chain != chain:
        find(where, what, as_text(chain), "no commit ends there" if at is None else at.chain)
        return None
    return "equal" if seq == state.run.head_seq else "extends"
