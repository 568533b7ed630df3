"""Retention: rows that a rule no longer keeps go, and a chained event says so.

A rule names a kind and what is old. Whole segments fall under it or stay. What remains of retired
rows is their place in order and chain, their logical hash, and the hash of each row in the event,
so that digests of content do not change. The files go with the next garbage collection.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import ancestry, list_branches, list_versions, segments_after
from ledger.catalog.records import SegmentInfo
from ledger.catalog.retire import RETIRABLE
from ledger.errors import Corrupt, InvalidArgument, NotFound, explain
from ledger.events import RowsRetired
from ledger.hashing import logical_hash, row_content_hashes

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["RetainReport", "RetireGroup", "Rule", "apply_retention", "plan_retention"]

PRODUCER = "retention"
"""Writes the events, under this name."""

_ROWS_AN_EVENT = 100_000
"""An event holds a hash of 32 bytes for each row."""

_DAY_US = 86_400_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Which rows of a kind are old. Exactly one of the three limits is given.

    `keep_versions` N: rows recorded before the N-th newest weight version of the branch, and so by
    an older one. `before_version` V: rows recorded before version V was published.
    `older_than_days` D: committed more than D days ago. Rows that a branch sees of its ancestors
    must be old on that branch too; with `branch`, only its own rows and its own view count.
    """

    kind: str
    keep_versions: int | None = None
    before_version: int | None = None
    older_than_days: float | None = None
    branch: str | None = None

    def __post_init__(self) -> None:
        given = [
            value
            for value in (self.keep_versions, self.before_version, self.older_than_days)
            if value is not None
        ]
        if len(given) != 1 or not given[0] >= 0 or self.keep_versions == 0:
            raise _refused(
                self.kind,
                "one of keep_versions (1 or more), before_version, older_than_days",
                given or "none",
            )
        if self.kind not in RETIRABLE:
            raise _refused(self.kind, f"a kind whose rows may go: {sorted(RETIRABLE)}", self.kind)

    def __str__(self) -> str:
        if self.keep_versions is not None:
            said = f"keep {self.kind} of the newest {self.keep_versions} versions"
        elif self.before_version is not None:
            said = f"keep {self.kind} from version {self.before_version} on"
        else:
            said = f"keep {self.kind} for {self.older_than_days:g} days"
        return said if self.branch is None else f"{said} on branch {self.branch!r}"


@dataclasses.dataclass(frozen=True, slots=True)
class RetireGroup:
    """Segments of one branch that fall under a rule."""

    run_id: str
    branch: str
    segments: tuple[SegmentInfo, ...]
    size_bytes: int
    """Their share of the files that they lie in, by rows."""

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(s.rows for s in self.segments)


@dataclasses.dataclass(frozen=True, slots=True)
class RetainReport:
    """What was retired, or (dry run) would be."""

    rule: Rule
    groups: tuple[RetireGroup, ...]
    kept_rows: int
    """Rows of the kind that stay."""
    dry_run: bool

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "dry_run": self.dry_run,
            "rule": str(self.rule),
            "kind": self.rule.kind,
            "kept_rows": self.kept_rows,
            "groups": [
                {
                    "run_id": g.run_id,
                    "branch": g.branch,
                    "segments": len(g.segments),
                    "rows": g.rows,
                    "size_bytes": g.size_bytes,
                    "seqs": [g.segments[0].first_seq, g.segments[-1].last_seq],
                }
                for g in self.groups
            ],
        }

    def lines(self) -> list[str]:
        """For a reader."""
        verb = "would retire" if self.dry_run else "retired"
        made = [
            f"run {g.run_id!r}, branch {g.branch!r}: {verb} {g.rows} rows of {self.rule.kind} in "
            f"{len(g.segments)} segments (seq {g.segments[0].first_seq} to "
            f"{g.segments[-1].last_seq}), {g.size_bytes:,} bytes"
            for g in self.groups
        ]
        if not made:
            made.append("nothing falls under the rule")
        made.append(f"rule: {self.rule}; {self.kept_rows} rows of {self.rule.kind} stay")
        if self.groups and not self.dry_run:
            made.append("the files go with `ledger gc`, after its grace period")
        return made


def plan_retention(ledger: Ledger, rule: Rule, run_id: str | None = None) -> RetainReport:
    """What falls under the rule now. Changes nothing.

    Raises: NotFound where there is no such run, branch or version.
    """
    groups: list[RetireGroup] = []
    kept = 0
    for run in [ledger.run(run_id)] if run_id is not None else ledger.runs():
        if rule.branch is not None:
            ledger.branch(run.run_id, rule.branch)
        with ledger.catalog.read() as connection:
            segments = segments_after(connection, run.run_id, 0)
            old = _old(connection, run.run_id, rule)
        mine = [s for s in segments if s.kind == rule.kind and s.file is not None]
        by_branch: dict[str, list[SegmentInfo]] = {}
        for s in mine:
            if old(s):
                by_branch.setdefault(s.branch, []).append(s)
            else:
                kept += s.rows
        in_file = _rows_by_file(segments)
        for branch, chosen in sorted(by_branch.items()):
            size = sum(s.file.size_bytes * s.rows // in_file[s.file.path] for s in chosen if s.file)
            groups.append(RetireGroup(run.run_id, branch, tuple(chosen), size))
    return RetainReport(rule, tuple(groups), kept, dry_run=True)


def apply_retention(ledger: Ledger, plan: RetainReport) -> RetainReport:
    """Retire what was planned: one commit a branch, in which all of its segments go.

    Raises:
        Conflict: another process has retired some of it meanwhile: plan again.
        Corrupt: rows are not what was committed, so their hashes would be wrong.
        StorageFailed: the store or the catalog did not take it. Branches before it are done.
    """
    for group in plan.groups:
        events = _events(ledger, plan.rule, group)
        with ledger.writer(group.run_id, group.branch, producer=PRODUCER) as writer:
            writer.append(events)
        ledger.index.forget(group.run_id)
        ledger.assembled.clear()
    return dataclasses.replace(plan, dry_run=False)


def _events(ledger: Ledger, rule: Rule, group: RetireGroup) -> list[RowsRetired]:
    events: list[RowsRetired] = []
    chosen: list[SegmentInfo] = []
    rows = 0
    for s in group.segments:
        if chosen and rows + s.rows > _ROWS_AN_EVENT:
            events.append(_event(ledger, rule, chosen))
            chosen, rows = [], 0
        chosen.append(s)
        rows += s.rows
    return [*events, _event(ledger, rule, chosen)]


def _event(ledger: Ledger, rule: Rule, chosen: Sequence[SegmentInfo]) -> RowsRetired:
    hashes: list[bytes] = []
    size = 0
    for s in chosen:
        table = ledger.index.open(s)
        if logical_hash(table) != s.logical_hash:
            raise Corrupt(
                explain(
                    "rows were not retired: they are not what was committed",
                    on=f"run {s.run_id!r}, {s.kind}, seq {s.first_seq}",
                    expected=f"logical hash {s.logical_hash.hex()}",
                    found=logical_hash(table).hex(),
                    do="see what else is wrong: ledger verify",
                )
            )
        hashes += row_content_hashes(table)
        size += table.nbytes
    return RowsRetired(
        kind=rule.kind,
        first_seqs=np.array([s.first_seq for s in chosen], np.int64),
        row_counts=np.array([s.rows for s in chosen], np.int64),
        row_hashes=hashes,
        size_bytes=size,
        rule=str(rule),
    )


def _rows_by_file(segments: Sequence[SegmentInfo]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for s in segments:
        if s.file is not None:
            rows[s.file.path] = rows.get(s.file.path, 0) + s.rows
    return rows


def _old(connection: sa.Connection, run_id: str, rule: Rule) -> Any:
    """Tells of a segment whether all of its rows are old, wherever they are seen."""
    if rule.older_than_days is not None:
        before = time.time_ns() // 1000 - int(rule.older_than_days * _DAY_US)
        rows = connection.execute(
            sa.select(t.commits.c.first_seq).where(
                t.commits.c.run_id == run_id, t.commits.c.committed_at < before
            )
        )
        commits = {row.first_seq for row in rows}
        return lambda s: s.commit_seq in commits and rule.branch in (None, s.branch)
    names = [b.name for b in list_branches(connection, run_id)]
    views = []
    for name in names if rule.branch is None else [rule.branch]:
        lineage = dict(ancestry(connection, run_id, name))
        views.append((lineage, _cut(connection, run_id, rule, lineage)))

    def old(s: SegmentInfo) -> bool:
        if rule.branch is not None and s.branch != rule.branch:
            return False
        for lineage, cut in views:
            if s.branch not in lineage:
                continue
            limit = lineage[s.branch]
            if (limit is None or s.first_seq <= limit) and s.last_seq >= cut:
                return False
        return True

    return old


def _cut(connection: sa.Connection, run_id: str, rule: Rule, lineage: dict[str, int | None]) -> int:
    """The event from which on a branch keeps what it sees."""
    seen = sorted(
        v.seq
        for v in list_versions(connection, run_id=run_id)
        if v.branch in lineage
        and (lineage[v.branch] is None or v.seq <= (lineage[v.branch] or 0))
        and (rule.before_version is None or v.weight_version == rule.before_version)
    )
    if rule.before_version is not None:
        found = list_versions(connection, rule.before_version, run_id)
        if not found:
            raise NotFound(
                explain(
                    "a version was not found",
                    on=f"run {run_id!r}, version {rule.before_version}",
                    do=f"see them: ledger log --run {run_id}",
                )
            )
        return found[0].seq
    keep = rule.keep_versions or 1
    return 0 if len(seen) < keep else seen[-keep]


def _refused(kind: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain("a rule of retention was not understood", on=kind, expected=expected, found=found)
    )
