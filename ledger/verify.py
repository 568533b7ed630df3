"""Reading everything again, and comparing it with every row of the catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.derive import Derived, derive, ranges_of
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, IncompatibleFormat, StorageFailed
from ledger.hashing import (
    GENESIS,
    chain_link,
    column_digests,
    digest_of_columns,
    idempotency_key,
)
from ledger.segment import Identity, SegmentReader, read_identity
from ledger.writer import content_hash

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Finding", "VerifyReport", "verify_ledger"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place where the ledger is not what it says it is."""

    run_id: str
    where: str
    """A segment ('segment_generated at seq 17, runs/…'), commit or row of the catalog."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id}: {self.where}: {self.what}\n"
            f"  expected: {self.expected}\n  found:    {self.found}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome: everything that was read, and all that is wrong."""

    runs: int
    commits: int
    segments: int
    rows: int
    size_bytes: int
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
        totals = (
            f"{self.runs} runs, {self.commits} commits, {self.segments} segments, "
            f"{self.rows} events, {self.size_bytes} bytes"
        )
        verdict = "all as committed" if self.ok else f"{len(self.findings)} findings"
        return [line for f in self.findings for line in str(f).splitlines()] + [
            f"{totals}: {verdict}"
        ]


def verify_ledger(
    ledger: Ledger,
    run_id: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check file hashes, logical hashes, the chain and all catalog rows of a run, or of all runs.

    `progress(done, total)` is called after each segment. Nothing is changed, nothing is raised for
    what is found: a report lists it all.

    Raises:
        NotFound: no such run.
        StorageFailed: the store or the catalog cannot be read at all.
    """
    runs = [ledger.run(run_id)] if run_id is not None else ledger.runs()
    states = []
    for run in runs:
        with ledger.catalog.read() as connection:
            states.append(_State.read(connection, run.run_id))
    total = sum(len(state.segments) for state in states)
    done = 0
    findings: list[Finding] = []
    for state in states:
        check = _RunCheck(ledger, state)
        for segment in state.segments:
            check.segment(segment)
            done += 1
            if progress is not None:
                progress(done, total)
        check.commits()
        check.derived_rows()
        check.head()
        findings += check.findings
    return VerifyReport(
        runs=len(runs),
        commits=sum(len(state.commits) for state in states),
        segments=total,
        rows=sum(s.rows for state in states for s in state.segments),
        size_bytes=sum(
            s.file.size_bytes for state in states for s in state.segments if s.file is not None
        ),
        findings=tuple(findings),
    )


@dataclasses.dataclass(frozen=True)
class _State:
    """One consistent picture of a run's rows in the catalog."""

    run: Any
    segments: list[SegmentInfo]
    commits: list[Any]
    rows: dict[str, list[dict[str, Any]]]

    @staticmethod
    def read(connection: sa.Connection, run_id: str) -> _State:
        def of_run(table: sa.Table) -> list[dict[str, Any]]:
            query = sa.select(table).where(table.c.run_id == run_id)
            return [dict(row) for row in connection.execute(query).mappings()]

        commits = connection.execute(
            sa.select(t.commits).where(t.commits.c.run_id == run_id).order_by(t.commits.c.first_seq)
        ).all()
        derived = (t.branches, t.versions, t.consumption, t.producers, t.counters)
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
        self._reader = SegmentReader(ledger.store)  # remembers nothing: every file is read again
        self._by_commit = {c.first_seq: c for c in state.commits}
        self._chain = GENESIS
        self._next = 1
        self._parts: dict[int, list[tuple[SegmentInfo, pa.Table | None, dict[int, bytes]]]] = {}
        self._derived: list[tuple[Any, Derived]] = []

    def _find(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(
            Finding(self._state.run.run_id, where, what, _text(expected), _text(found))
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
        if s.file.row_offset == 0 and s.file.path.endswith(".arrow"):
            part = len(self._parts.get(s.commit_seq, []))
            identity = Identity(
                commit.run_id,
                commit.branch,
                commit.producer,
                commit.epoch,
                commit.producer_seq,
                part,
            )
            self._same(where, "who wrote it", identity, read_identity(table))
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
        """Branches, versions, consumption, producers and counters, against the events."""
        if len(self._derived) < len(self._state.commits):
            return  # some events could not be read, so what follows from them is not known
        self._compare_rows(t.branches, self._branches())
        self._compare_rows(t.versions, self._versions())
        self._compare_rows(t.consumption, self._consumption())
        self._at_least("producers", "producer", "epoch", self._epochs())
        self._at_least("counters", "name", "next", self._used())

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

    def _epochs(self) -> dict[str, int]:
        epochs: dict[str, int] = {}
        for c in self._state.commits:
            epochs[c.producer] = max(c.epoch, epochs.get(c.producer, c.epoch))
        return epochs

    def _used(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for _, derived in self._derived:
            for name, largest in derived.used.items():
                used[name] = max(largest + 1, used.get(name, 0))
        return used

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

    def _at_least(self, table: str, key: str, column: str, wanted: dict[str, int]) -> None:
        found = {row[key]: row[column] for row in self._state.rows[table]}
        for name, low in sorted(wanted.items()):
            if found.get(name, -1) < low:
                self._find(
                    f"catalog, {table} {name!r}", f"its {column}", f"{low} or more", found.get(name)
                )

    def head(self) -> None:
        """The run's head, against its last segment."""
        run = self._state.run
        self._same("catalog, runs", "the last seq", self._next - 1, run.head_seq)
        self._same("catalog, runs", "the head of the chain", self._chain, run.head_chain)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(v) for v in value) + ")"
    return str(value)
