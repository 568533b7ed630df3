"""Reading everything again: the catalog, every segment, and the files of every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.derive import Derived, derive, ranges_of
from ledger.catalog.integrity import catalog_differences
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.encode import events_of
from ledger.errors import Corrupt, IncompatibleFormat, NotFound, StorageFailed
from ledger.events import CheckpointSaved
from ledger.finding import Finding, as_text
from ledger.hashing import (
    GENESIS,
    chain_link,
    column_digests,
    digest_of_columns,
    idempotency_key,
)
from ledger.segment import HOT_FORMAT, Identity, read_identities
from ledger.segment_reader import SegmentReader
from ledger.verify_checkpoints import compare_checkpoint
from ledger.writer import content_hash

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
        return [line for f in self.findings for line in str(f).splitlines()] + [
            f"{totals}: {verdict}"
        ]


def verify_ledger(
    ledger: Ledger,
    run_id: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    checkpoints: bool = True,
) -> VerifyReport:
    """Check the catalog, file hashes, logical hashes, the chain, all catalog rows and checkpoints.

    Of one run, or of all. The catalog comes first: where it is damaged as a database, that is what
    is reported, and nothing else is compared with it. `runs.created_at`, `commits.committed_at` and
    `meta.ledger_id` have no second record: only their type is checked. Of a producer's epoch it is
    known only that it is not below that of its commits.

    `checkpoints=False` leaves out the files of checkpoints, which may be large, or kept elsewhere.

    `progress(done, total)` is called after each segment and each checkpoint. Nothing is changed,
    nothing is raised for what is found: a report lists it all.

    Raises:
        NotFound: no such run.
        StorageFailed: the store or the catalog cannot be read at all.
    """
    damage = [
        Finding(None, f"the catalog, {ledger.catalog.name}", what, expected, found)
        for what, expected, found in catalog_differences(ledger.catalog)
    ]
    if damage:
        return VerifyReport(0, 0, 0, 0, 0, None, tuple(damage))
    runs = [ledger.run(run_id)] if run_id is not None else ledger.runs()
    states = []
    for run in runs:
        with ledger.catalog.read() as connection:
            states.append(_State.read(connection, run.run_id))
    segments = sum(len(state.segments) for state in states)
    saved = sum(state.saved for state in states) if checkpoints else 0
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        for _ in range(count):
            done += 1
            if progress is not None:
                progress(done, segments + saved)

    findings: list[Finding] = []
    for state in states:
        check = _RunCheck(ledger, state)
        for segment in state.segments:
            check.segment(segment)
            advance(1)
        check.commits()
        check.derived_rows()
        check.head()
        if checkpoints:
            for compared in check.checkpoints():
                advance(compared)
        findings += check.findings
    return VerifyReport(
        runs=len(runs),
        commits=sum(len(state.commits) for state in states),
        segments=segments,
        rows=sum(s.rows for state in states for s in state.segments),
        size_bytes=sum(
            s.file.size_bytes for state in states for s in state.segments if s.file is not None
        ),
        checkpoints=saved if checkpoints else None,
        findings=tuple(findings),
    )


@dataclasses.dataclass(frozen=True)
class _State:
    """One consistent picture of a run's rows in the catalog."""

    run: Any
    segments: list[SegmentInfo]
    commits: list[Any]
    rows: dict[str, list[dict[str, Any]]]

    @property
    def saved(self) -> int:
        """Checkpoints that the run's segments record."""
        return sum(s.rows for s in self.segments if s.kind == CheckpointSaved.KIND)

    @staticmethod
    def read(connection: sa.Connection, run_id: str) -> _State:
        def of_run(table: sa.Table) -> list[dict[str, Any]]:
            # An expression instead of the bare column: no index serves it, so the rows come from
            # the table itself.
            query = sa.select(table).where(table.c.run_id.concat("") == run_id)
            return [dict(row) for row in connection.execute(query).mappings()]

        commits = connection.execute(
            sa.select(t.commits)
            .where(t.commits.c.run_id.concat("") == run_id)
            .order_by(t.commits.c.first_seq)
        ).all()
        derived = (t.branches, t.versions, t.consumption, t.producers)
        return _State(
            run=connection.execute(sa.select(t.runs).where(t.runs.c.run_id == run_id)).one(),
            segments=segments_after(connection, run_id, 0),
            commits=list(commits),
            rows={table.name: of_run(table) for table in derived},
        )


class _RunCheck:
    """Walks one run from its first segment; `findings` collects what is wrong."""

    def __init__(self, ledger: Ledger, state: _State) -> None:
        self.findings: list[Finding] = []
        self._state = state
        self._ledger = ledger
        self._reader = SegmentReader(ledger.store)  # remembers nothing: every file is read again
        self._by_commit = {c.first_seq: c for c in state.commits}
        self._chain = GENESIS
        self._next = 1
        self._parts: dict[int, list[tuple[SegmentInfo, pa.Table | None, dict[int, bytes]]]] = {}
        self._derived: list[tuple[Any, Derived]] = []

    def _find(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(
            Finding(self._state.run.run_id, where, what, as_text(expected), as_text(found))
        )

    def _same(self, where: str, what: str, expected: object, found: object) -> None:
        if expected != found:
            self._find(where, what, expected, found)

    def segment(self, s: SegmentInfo) -> None:
        """One segment: its file, its rows, its place in order and chain."""
        where = f"{s.kind} at seq {s.first_seq}" + (f", {s.file.path}" if s.file else "")
        self._same(where, "its place in the order", self._next, s.first_seq)
        self._next = s.first_seq + s.rows
        commit = self._by_commit.get(s.commit_seq)
        if commit is None:
            self._find(where, "its commit", f"a commit at seq {s.commit_seq}", "none")
            return
        self._same(where, "the branch of its commit", commit.branch, s.branch)
        key = idempotency_key(commit.branch, commit.producer, commit.epoch, commit.producer_seq)
        link = chain_link(self._chain, s.first_seq, s.kind, s.rows, s.logical_hash, key)
        self._same(where, "the chain", link, s.chain)
        # From here on the stored link counts, so that one wrong row is one finding.
        self._chain = s.chain
        table, digests = self._rows(s, where, commit)
        self._parts.setdefault(s.commit_seq, []).append((s, table, digests))

    def _rows(
        self, s: SegmentInfo, where: str, commit: Any
    ) -> tuple[pa.Table | None, dict[int, bytes]]:
        if s.file is None:
            self._find(where, "its location", "a row in locations", "none")
            return None, {}
        try:
            table = self._reader.open(s.file, s.kind, s.layout)
        except (Corrupt, IncompatibleFormat, StorageFailed) as error:
            what, *sides = str(error).splitlines()
            said = dict(line.strip().partition(":")[::2] for line in sides)
            expected, found = (said.get(side, "").strip() for side in ("expected", "found"))
            self._find(where, what.split(":")[0], expected, found)
            return None, {}
        self._same(where, "its number of rows", s.rows, table.num_rows)
        self._same(where, "its size in bytes", s.file.size_bytes, self._reader.size(s.file))
        digests = column_digests(table)
        logical = digest_of_columns(s.kind, s.layout, table.num_rows, digests)
        self._same(where, "its logical hash", s.logical_hash, logical)
        self._same(where, "the ranges of its columns", ranges_of(table), dict(s.ranges))
        if s.file.format == HOT_FORMAT:
            part = len(self._parts.get(s.commit_seq, []))
            identity = Identity(
                commit.run_id,
                commit.branch,
                commit.producer,
                commit.epoch,
                commit.producer_seq,
                part,
            )
            wrote = (identity, s.file.row_offset, s.rows)
            named = [who for who in read_identities(table) if who[1] == s.file.row_offset]
            if [wrote] != named:
                self._find(where, "who wrote it", wrote, named)
        return table, digests

    def commits(self) -> None:
        """Each commit: its range, its link, its content; and what derives from its events."""
        for commit in self._state.commits:
            where = f"commit at seq {commit.first_seq}"
            parts = self._parts.get(commit.first_seq, [])
            if not parts:
                self._find(where, "its segments", "at least one", "none")
                continue
            self._same(where, "its last seq", parts[-1][0].last_seq, commit.last_seq)
            self._same(where, "its chain", parts[-1][0].chain, commit.chain)
            tables = {s.kind: table for s, table, _ in parts if table is not None}
            if len(tables) < len(parts):
                continue  # a segment could not be read: said already
            digests = {s.kind: found for s, _, found in parts}
            wanted = content_hash(tables, digests)
            self._same(where, "its content", commit.content_hash.hex(), wanted.hex())
            self._derived.append((commit, derive(tables)))

    def derived_rows(self) -> None:
        """Branches, versions, consumption and producers, against the events."""
        if len(self._derived) < len(self._state.commits):
            return  # some events could not be read, so what follows from them is not known
        self._compare_rows(t.branches, self._branches())
        self._compare_rows(t.versions, self._versions())
        self._compare_rows(t.consumption, self._consumption())
        self._epochs()

    def _branches(self) -> Iterable[tuple[Any, ...]]:
        run_id = self._state.run.run_id
        yield (run_id, "main", None, None, None, None)
        for commit, derived in self._derived:
            for f in derived.forked:
                seq = commit.first_seq + f.offset
                yield (run_id, f.branch, f.parent, f.fork_seq, f.weight_version, seq)

    def _versions(self) -> Iterable[tuple[Any, ...]]:
        for c, derived in self._derived:
            for p in derived.published:
                seq = c.first_seq + p.offset
                version, parent = p.weight_version, p.parent_version
                yield (c.run_id, version, parent, c.branch, p.step, p.root, seq)

    def _consumption(self) -> Iterable[tuple[Any, ...]]:
        for c, derived in self._derived:
            for d in derived.consumed:
                for index in d.indices:
                    yield (c.run_id, c.branch, index, d.step, c.first_seq + d.offset)

    def _epochs(self) -> None:
        """A producer's epoch: at least that of its commits; a writer need not have appended."""
        wrote: dict[str, int] = {}
        for c in self._state.commits:
            wrote[c.producer] = max(c.epoch, wrote.get(c.producer, c.epoch))
        found = {row["producer"]: row["epoch"] for row in self._state.rows["producers"]}
        for name, low in sorted(wrote.items()):
            if found.get(name, -1) < low:
                where = f"catalog, producers {name!r}"
                self._find(where, "its epoch", f"{low} or more", found.get(name))

    def _compare_rows(self, table: sa.Table, wanted: Iterable[tuple[Any, ...]]) -> None:
        columns = [c.name for c in table.columns]
        key = [c.name for c in table.primary_key.columns]
        expected = {tuple(row[columns.index(k)] for k in key): row for row in wanted}
        found = {
            tuple(row[k] for k in key): tuple(row[c] for c in columns)
            for row in self._state.rows[table.name]
        }
        for name in sorted(expected.keys() | found.keys()):
            self._same(
                f"catalog, {table.name} {list(name[1:])}",
                "what the events say",
                expected.get(name, "no row"),
                found.get(name, "no row"),
            )

    def checkpoints(self) -> Iterator[int]:
        """The files of every recorded checkpoint; yields how many were looked at, step by step."""
        for segment in self._state.segments:
            if segment.kind != CheckpointSaved.KIND:
                continue
            parts = self._parts.get(segment.commit_seq, [])
            table = next((found for s, found, _ in parts if s is segment), None)
            if table is None:
                yield segment.rows  # what they should be could not be read: said already
                continue
            for event in events_of(table, CheckpointSaved):
                of = f"checkpoint of version {event.weight_version} on branch {segment.branch!r}"
                try:
                    folder = self._ledger.locate(event.location)
                except NotFound:
                    self._find(of, "its folder", "an absolute path", event.location)
                else:
                    for what, expected, found in compare_checkpoint(folder, event):
                        self._find(f"{of}, {folder}", what, expected, found)
                yield 1

    def head(self) -> None:
        """The run's head, against its last segment."""
        run = self._state.run
        self._same("catalog, runs", "the last seq", self._next - 1, run.head_seq)
        self._same("catalog, runs", "the head of the chain", self._chain, run.head_chain)
