"""Checking one run: its rows in the catalog against each other, the chain, and the events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from ledger.appending import content_of
from ledger.catalog import tables as t
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.events import CheckpointSaved
from ledger.finding import Finding, as_text
from ledger.hashing import GENESIS, chain_link, idempotency_key
from ledger.segment import Identity
from ledger.verify_files import Outcome

__all__ = ["RunCheck", "RunState"]

_DERIVED = (t.branches, t.versions, t.consumption, t.producers, t.tombstones, t.unreferenced)


@dataclasses.dataclass(frozen=True)
class RunState:
    """One consistent picture of a run's rows in the catalog."""

    run: Any
    segments: list[SegmentInfo]
    commits: list[Any]
    rows: dict[str, list[dict[str, Any]]]
    exported: int
    """Links beside the data are written up to this event, says the catalog."""
    half_ranges: list[tuple[str, str, int]]
    """Segment, column and value of ranges that have one end only."""

    @property
    def saved(self) -> int:
        """Checkpoints that the run's segments record."""
        return sum(s.rows for s in self.segments if s.kind == CheckpointSaved.KIND)

    @staticmethod
    def read(connection: sa.Connection, run_id: str) -> RunState:
        """From one transaction."""

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
        exported = of_run(t.exports)
        return RunState(
            run=connection.execute(sa.select(t.runs).where(t.runs.c.run_id == run_id)).one(),
            segments=segments_after(connection, run_id, 0),
            commits=list(commits),
            rows={table.name: of_run(table) for table in _DERIVED},
            exported=exported[0]["last_seq"] if exported else 0,
            half_ranges=_half_ranges(connection, run_id),
        )

    def writers(self) -> dict[int, Identity]:
        """First seq of each segment → who must have written it."""
        commits = {c.first_seq: c for c in self.commits}
        parts: dict[int, int] = {}
        found = {}
        for s in self.segments:
            c = commits.get(s.commit_seq)
            if c is not None:
                part = parts.get(s.commit_seq, 0)
                parts[s.commit_seq] = part + 1
                found[s.first_seq] = Identity(
                    c.run_id, c.branch, c.producer, c.epoch, c.producer_seq, part
                )
        return found


def _half_ranges(connection: sa.Connection, run_id: str) -> list[tuple[str, str, int]]:
    found = []
    for name in t.RANGES:
        low, high = t.segments.c[f"min_{name}"], t.segments.c[f"max_{name}"]
        query = sa.select(t.segments.c.kind, t.segments.c.first_seq, low, high).where(
            t.segments.c.run_id == run_id, low.is_(None) != high.is_(None)
        )
        for kind, seq, least, most in connection.execute(query):
            column = f"min_{name}" if most is None else f"max_{name}"
            found.append((f"{kind} at seq {seq}", column, least if most is None else most))
    return found


class RunCheck:
    """Walks one run from its first segment; `findings` collects what is wrong."""

    def __init__(self, state: RunState, outcomes: Mapping[int, Outcome]) -> None:
        self.findings: list[Finding] = []
        self._state = state
        self._run_id: str = state.run.run_id
        self._outcomes = outcomes
        self._retired = {
            first_seq
            for o in outcomes.values()
            if o.derived is not None
            for gone in o.derived.retired
            for first_seq in gone.first_seqs
        }

    def run(self) -> None:
        """Check everything."""
        self._segments()
        self._commits()
        if self._all_read():
            self._compare_rows(t.branches, self._branches())
            self._compare_rows(t.versions, self._versions())
            self._compare_rows(t.consumption, self._consumption())
            self._compare_rows(t.tombstones, self._tombstones())
        self._epochs()
        self._unreferenced()

    def find(self, where: str, what: str, expected: object, found: object) -> None:
        """Note one thing that is wrong."""
        self.findings.append(Finding(self._run_id, where, what, as_text(expected), as_text(found)))

    def same(self, where: str, what: str, expected: object, found: object) -> None:
        """Note it where the two differ."""
        if expected != found:
            self.find(where, what, expected, found)

    def _segments(self) -> None:
        """Each segment's place in order and chain, its location, and what its file told."""
        commits = {c.first_seq: c for c in self._state.commits}
        chain, seq = GENESIS, 1
        for s in self._state.segments:
            where = f"{s.kind} at seq {s.first_seq}" + (f", {s.file.path}" if s.file else "")
            self.same(where, "its place in the order", seq, s.first_seq)
            seq = s.first_seq + s.rows
            commit = commits.get(s.commit_seq)
            if commit is None:
                self.find(where, "its commit", f"a commit at seq {s.commit_seq}", "none")
                continue
            self.same(where, "the branch of its commit", commit.branch, s.branch)
            key = idempotency_key(commit.branch, commit.producer, commit.epoch, commit.producer_seq)
            link = chain_link(chain, s.first_seq, s.kind, s.rows, s.logical_hash, key)
            self.same(where, "the chain", link, s.chain)
            # From here on the stored link counts, so that one wrong row is one finding.
            chain = s.chain
            self._location(s, where)
        for where, column, value in self._state.half_ranges:
            self.find(where, f"its {column}", "two ends, or none", value)
        run = self._state.run
        self.same("catalog, runs", "the last seq", seq - 1, run.head_seq)
        self.same("catalog, runs", "the head of the chain", chain, run.head_chain)

    def _location(self, s: SegmentInfo, where: str) -> None:
        retired = s.first_seq in self._retired
        if s.file is None and not retired:
            wanted = "a row in locations, or an event that retired its rows"
            self.find(where, "its location", wanted, "none")
        elif s.file is not None and retired:
            self.find(where, "its location", "none: an event retired its rows", s.file.path)
        outcome = self._outcomes.get(s.first_seq)
        for what, expected, found in () if outcome is None else outcome.differences:
            self.find(where, what, expected, found)

    def _all_read(self) -> bool:
        """Whether all events that the catalog keeps rows of could be read."""
        return all(
            s.first_seq in self._retired
            or ((o := self._outcomes.get(s.first_seq)) is not None and o.derived is not None)
            for s in self._state.segments
        )

    def _commits(self) -> None:
        """Each commit: its range, its link, its content."""
        parts: dict[int, list[SegmentInfo]] = {}
        for s in self._state.segments:
            parts.setdefault(s.commit_seq, []).append(s)
        for commit in self._state.commits:
            where = f"commit at seq {commit.first_seq}"
            segments = parts.get(commit.first_seq, [])
            if not segments:
                self.find(where, "its segments", "at least one", "none")
                continue
            self.same(where, "its last seq", segments[-1].last_seq, commit.last_seq)
            self.same(where, "its chain", segments[-1].chain, commit.chain)
            outcomes = [self._outcomes.get(s.first_seq) for s in segments]
            content = [o.content_part for o in outcomes if o is not None and o.content_part]
            if len(content) == len(segments):  # the others are retired, or said already
                wanted = content_of(content)
                self.same(where, "its content", commit.content_hash.hex(), wanted.hex())

    def _derived(self) -> Iterator[tuple[SegmentInfo, Any]]:
        for s in self._state.segments:
            outcome = self._outcomes.get(s.first_seq)
            if outcome is not None and outcome.derived is not None:
                yield s, outcome.derived

    def _branches(self) -> Iterable[tuple[Any, ...]]:
        yield (self._run_id, "main", None, None, None, None)
        for s, derived in self._derived():
            for f in derived.forked:
                seq = s.first_seq + f.offset
                yield (self._run_id, f.branch, f.parent, f.fork_seq, f.weight_version, seq)

    def _versions(self) -> Iterable[tuple[Any, ...]]:
        for s, derived in self._derived():
            for p in derived.published:
                seq = s.first_seq + p.offset
                version, parent = p.weight_version, p.parent_version
                yield (self._run_id, version, parent, s.branch, p.step, p.root, seq)

    def _consumption(self) -> Iterable[tuple[Any, ...]]:
        for s, derived in self._derived():
            for d in derived.consumed:
                for index in d.indices:
                    yield (self._run_id, s.branch, index, d.step, s.first_seq + d.offset)

    def _tombstones(self) -> Iterable[tuple[Any, ...]]:
        for s, derived in self._derived():
            for gone in derived.retired:
                for first_seq in gone.first_seqs:
                    yield (self._run_id, first_seq, s.first_seq + gone.offset)

    def _epochs(self) -> None:
        """A producer's epoch: at least that of its commits; a writer need not have appended."""
        wrote: dict[str, int] = {}
        for c in self._state.commits:
            wrote[c.producer] = max(c.epoch, wrote.get(c.producer, c.epoch))
        found = {row["producer"]: row["epoch"] for row in self._state.rows["producers"]}
        for name, low in sorted(wrote.items()):
            if found.get(name, -1) < low:
                where = f"catalog, producers {name!r}"
                self.find(where, "its epoch", f"{low} or more", found.get(name))

    def _unreferenced(self) -> None:
        """A file that collection may remove is one that no segment lies in."""
        named = {s.file.path for s in self._state.segments if s.file is not None}
        for row in self._state.rows["unreferenced"]:
            if row["path"] in named:
                where = f"catalog, unreferenced {row['path']}"
                self.find(where, "what lies in it", "no segment", "segments that are kept")

    def _compare_rows(self, table: sa.Table, wanted: Iterable[tuple[Any, ...]]) -> None:
        columns = [c.name for c in table.columns]
        key = [c.name for c in table.primary_key.columns]
        expected = {tuple(row[columns.index(k)] for k in key): row for row in wanted}
        found = {
            tuple(row[k] for k in key): tuple(row[c] for c in columns)
            for row in self._state.rows[table.name]
        }
        for name in sorted(expected.keys() | found.keys()):
            self.same(
                f"catalog, {table.name} {list(name[1:])}",
                "what the events say",
                expected.get(name, "no row"),
                found.get(name, "no row"),
            )
