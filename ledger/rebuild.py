"""Making the catalog again from the store alone: links, segments and sealed files.

Reading (`read_store`) and writing (`fill`) are apart: a dry run only reads. What is restored is the
longest part of each run that the links tell without a hole and whose chain holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.derive import derive
from ledger.catalog.records import MAIN, SegmentInfo
from ledger.errors import AlreadyExists, Conflict, Corrupt, LedgerError, NotFound, explain
from ledger.finding import Finding, as_text
from ledger.hashing import GENESIS, chain_link, idempotency_key
from ledger.links import LinkedCommit, parse_links, read_sealed_json, run_object, same_commit
from ledger.placement import Placement, StoredRun, list_runs
from ledger.rebuild_report import RebuildReport, Unlinked
from ledger.segment_reader import SegmentReader
from ledger.storage import ObjectStore

__all__ = ["DERIVED_KINDS", "RebuildReport", "Unlinked", "fill", "read_store"]

DERIVED_KINDS = ("branch_forked", "weights_published", "step_committed", "rows_retired")
"""Kinds whose events the catalog keeps a row of; they are read again."""

_ROWS = 500  # inserted at once


def read_store(
    store: ObjectStore,
    ledger_id: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RebuildReport:
    """Everything that the store tells of its runs. Changes nothing.

    `ledger_id` is what another object says; the runs' own objects must agree with it.
    `progress(done, total)` is called after each run.

    Raises:
        StorageFailed: the store cannot be read.
        Conflict: runs of several ledgers lie there.
    """
    stored = list_runs(store)
    rebuilt = []
    for number, run in enumerate(stored):
        rebuilt.append(_RunRebuild(store, run))
        rebuilt[-1].read()
        if progress is not None:
            progress(number + 1, len(stored))
    ids = {r.ledger_id for r in rebuilt if r.ledger_id is not None}
    ids |= set() if ledger_id is None else {ledger_id}
    if len(ids) > 1:
        raise Conflict(
            explain(
                "the catalog was not made again: the store holds runs of several ledgers",
                on=store.uri,
                expected="one ledger id",
                found=sorted(ids),
                do="move the runs that were copied here to a ledger of their own",
            )
        )
    rows: dict[str, list[dict[str, Any]]] = {table.name: [] for table in t.METADATA.sorted_tables}
    for r in rebuilt:
        for name, made in r.rows.items():
            rows[name] += made
    return RebuildReport(
        ledger_id=next(iter(ids), None),
        runs=len(rebuilt),
        commits=len(rows["commits"]),
        segments=len(rows["segments"]),
        events=sum(row["rows"] for row in rows["segments"]),
        sealed=sum(r.sealed for r in rebuilt),
        retired=len(rows["tombstones"]),
        unlinked=tuple(u for r in rebuilt for u in r.unlinked),
        findings=tuple(f for r in rebuilt for f in r.findings),
        beyond=tuple(path for r in rebuilt for path in r.beyond),
        rows=rows,
    )


def fill(connection: sa.Connection, report: RebuildReport) -> None:
    """Write what was read into empty tables, within the connection's transaction.

    `meta` is the caller's: it says what is not in the runs.

    Raises: AlreadyExists where a run is there already.
    """
    if connection.execute(sa.select(t.runs).limit(1)).first() is not None:
        raise AlreadyExists(
            explain(
                "a catalog was not made again: it has runs already",
                expected="empty tables",
                do="see whether it is sound: ledger verify; to replace it: --force",
            )
        )
    for table in t.METADATA.sorted_tables:
        rows = report.rows[table.name]
        for start in range(0, len(rows), _ROWS):
            connection.execute(table.insert(), rows[start : start + _ROWS])


class _RunRebuild:
    """One run, from its objects to its rows."""

    def __init__(self, store: ObjectStore, stored: StoredRun) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.findings: list[Finding] = []
        self.unlinked: list[Unlinked] = []
        self.ledger_id: str | None = None
        self.sealed = 0
        self.beyond: list[str] = []
        self._last_by_path: dict[str, int] = {}
        self._store = store
        self._stored = stored
        self._reader = SegmentReader(store)
        self._run_id = stored.run_id

    def read(self) -> None:
        created_at = self._created_at()
        known = self._linked()
        commits = self._prefix(known)
        end = commits[-1].last_seq if commits else 0
        self.beyond = [path for path, last in self._last_by_path.items() if last > end]
        placement = Placement(self._store, self._stored)
        for path, error in placement.unreadable:
            self._find(path, "a sealed file", "one that can be read", str(error).splitlines()[0])
        self._rows_of(commits, created_at, placement)
        linked = {s.file.path for c in known.values() for s in c.segments if s.file is not None}
        for (producer, epoch), (files, keys) in placement.unlinked(linked).items():
            self.unlinked.append(Unlinked(self._run_id, producer, epoch, files, keys))

    def _find(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(Finding(self._run_id, where, what, as_text(expected), as_text(found)))

    def _object(self, path: str, what: str) -> dict[str, Any] | None:
        try:
            return read_sealed_json(path, self._store.read(path))
        except (LedgerError, NotFound) as error:
            first, _, rest = str(error).partition("\n")
            self._find(path, what, "the object that was written", rest.strip() or first)
            return None

    def _created_at(self) -> int | None:
        body = self._object(run_object(self._run_id), "when the run was made")
        if body is None:
            return None
        self.ledger_id = str(body["ledger_id"])
        return int(body["created_at"])

    def _linked(self) -> dict[int, LinkedCommit]:
        """First seq → commit, from all objects of links; the last one read says where it lies."""
        found: dict[int, LinkedCommit] = {}
        for path in self._stored.links:
            try:
                body, commits = parse_links(path, self._store.read(path))
            except LedgerError as error:
                first, _, rest = str(error).partition("\n")
                self._find(path, first, "the links that were written", rest.strip())
                continue
            self.ledger_id = self.ledger_id or str(body["ledger_id"])
            self._last_by_path[path] = max((c.last_seq for c in commits), default=0)
            for commit in commits:
                earlier = found.get(commit.first_seq)
                if earlier is not None and not same_commit(earlier, commit):
                    self._find(
                        path,
                        f"the commit at seq {commit.first_seq}",
                        f"chain {earlier.chain.hex()}, as another object of links says",
                        f"chain {commit.chain.hex()}",
                    )
                    continue
                found[commit.first_seq] = commit
        return found

    def _prefix(self, linked: Mapping[int, LinkedCommit]) -> list[LinkedCommit]:
        """The commits from the first on, as far as they follow each other and the chain holds."""
        commits: list[LinkedCommit] = []
        chain, seq = GENESIS, 1
        while (commit := linked.get(seq)) is not None:
            key = idempotency_key(commit.branch, commit.producer, commit.epoch, commit.producer_seq)
            for s in commit.segments:
                chain = chain_link(chain, s.first_seq, s.kind, s.rows, s.logical_hash, key)
                if s.first_seq != seq or chain != s.chain:
                    self._find(f"links, {s.kind} at seq {s.first_seq}", "the chain", chain, s.chain)
                    return commits
                seq += s.rows
            if (seq - 1, chain) != (commit.last_seq, commit.chain):
                where = f"links, commit at seq {commit.first_seq}"
                self._find(where, "its end", (seq - 1, chain), (commit.last_seq, commit.chain))
                return commits
            commits.append(commit)
        beyond = sorted(first for first in linked if first >= seq)
        if beyond:
            self._find(
                f"links, seq {seq} to {beyond[0] - 1}",
                "commits without links, with others after them",
                "an object of links",
                f"none; {len(beyond)} commits from seq {beyond[0]} on are left out",
            )
        return commits

    def _rows_of(
        self, commits: list[LinkedCommit], created_at: int | None, placement: Placement
    ) -> None:
        run_id, last = self._run_id, commits[-1] if commits else None
        if created_at is None:
            created_at = commits[0].committed_at if commits else 0
        head_seq = 0 if last is None else last.last_seq
        rows = self.rows
        rows["runs"] = [
            {
                "run_id": run_id,
                "created_at": created_at,
                "head_seq": head_seq,
                "head_chain": GENESIS if last is None else last.chain,
            }
        ]
        rows["producers"] = self._producers(commits)
        rows["commits"] = [_commit_row(c) for c in commits]
        rows["segments"] = [_segment_row(s) for c in commits for s in c.segments]
        rows["locations"], rows["unreferenced"] = [], []
        # Where links are left out, all of them are written again.
        whole = head_seq and not self.beyond
        rows["exports"] = [{"run_id": run_id, "last_seq": head_seq}] if whole else []
        placed = {s.first_seq: placement.place(s) for c in commits for s in c.segments}
        self._derive(commits, placed)
        retired = {row["first_seq"] for row in rows["tombstones"]}
        for c in commits:
            for s in c.segments:
                if s.first_seq not in retired:
                    self._locate(s, placed[s.first_seq])
        named = {row["path"] for row in rows["locations"]}
        rows["unreferenced"] = placement.left_over(
            (s for c in commits for s in c.segments), named, retired
        )

    def _locate(self, s: SegmentInfo, placed: SegmentInfo) -> None:
        where = f"{s.kind} at seq {s.first_seq}"
        if placed.file is None:
            self._find(where, "where its rows lie", "a file, or an event that retired them", "none")
            return
        if not self._stored.has(placed.file.path):
            self._find(where, "its file", placed.file.path, "no such file")
        self.sealed += placed.file.path in self._stored.sealed
        self.rows["locations"].append(
            {
                "run_id": s.run_id,
                "first_seq": s.first_seq,
                "path": placed.file.path,
                "format": placed.file.format,
                "row_offset": placed.file.row_offset,
                "rows": placed.file.rows,
                "file_hash": placed.file.file_hash,
                "size_bytes": placed.file.size_bytes,
            }
        )

    def _producers(self, commits: Iterable[LinkedCommit]) -> list[dict[str, Any]]:
        epochs: dict[str, int] = {}
        for path in self._stored.producers:
            body = self._object(path, "an epoch of a producer")
            if body is not None:
                epochs[body["producer"]] = max(body["epoch"], epochs.get(body["producer"], 0))
        for c in commits:
            epochs[c.producer] = max(c.epoch, epochs.get(c.producer, 0))
        return [
            {"run_id": self._run_id, "producer": name, "epoch": epoch}
            for name, epoch in sorted(epochs.items())
        ]

    def _derive(self, commits: Iterable[LinkedCommit], placed: Mapping[int, SegmentInfo]) -> None:
        """The rows that follow from the events themselves."""
        rows = self.rows
        rows["branches"] = [_branch(self._run_id, MAIN)]
        rows["versions"], rows["consumption"], rows["tombstones"] = [], [], []
        for c in commits:
            for s in c.segments:
                if s.kind not in DERIVED_KINDS:
                    continue
                file = placed[s.first_seq].file
                if file is None:
                    continue  # said where it is located
                try:
                    table = self._reader.open(file, s.kind, s.layout)
                except Corrupt as error:
                    first, _, rest = str(error).partition("\n")
                    self._find(f"{s.kind} at seq {s.first_seq}", first, "its rows", rest.strip())
                    continue
                made = derive({s.kind: table})
                for f in made.forked:
                    row = _branch(self._run_id, f.branch)
                    row |= {"parent": f.parent, "fork_seq": f.fork_seq}
                    row |= {"fork_version": f.weight_version, "seq": s.first_seq + f.offset}
                    rows["branches"].append(row)
                for p in made.published:
                    rows["versions"].append(
                        {
                            "run_id": self._run_id,
                            "weight_version": p.weight_version,
                            "parent_version": p.parent_version,
                            "branch": c.branch,
                            "step": p.step,
                            "root": p.root,
                            "seq": s.first_seq + p.offset,
                        }
                    )
                for d in made.consumed:
                    rows["consumption"] += [
                        {
                            "run_id": self._run_id,
                            "branch": c.branch,
                            "sample_index": index,
                            "step": d.step,
                            "seq": s.first_seq + d.offset,
                        }
                        for index in d.indices
                    ]
                for gone in made.retired:
                    seq = s.first_seq + gone.offset
                    rows["tombstones"] += [
                        {"run_id": self._run_id, "first_seq": first, "seq": seq}
                        for first in gone.first_seqs
                    ]


def _branch(run_id: str, name: str) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "name": name,
        "parent": None,
        "fork_seq": None,
        "fork_version": None,
        "seq": None,
    }


def _commit_row(c: LinkedCommit) -> dict[str, Any]:
    return {column.name: getattr(c, column.name) for column in t.commits.columns}


def _segment_row(s: SegmentInfo) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: getattr(s, name)
        for name in (
            "run_id",
            "first_seq",
            "rows",
            "kind",
            "layout",
            "branch",
            "commit_seq",
            "logical_hash",
            "chain",
        )
    }
    for name in t.RANGES:
        row[f"min_{name}"], row[f"max_{name}"] = s.ranges.get(name, (None, None))
    return row
