"""Reads of the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.records import BranchInfo, RunInfo, SegmentInfo, VersionInfo
from ledger.errors import NotFound, explain
from ledger.segment import SegmentFile

__all__ = [
    "ancestry",
    "list_branches",
    "list_runs",
    "list_versions",
    "segments_after",
    "select_in",
]

_CHUNK = 500  # SQLite takes 999 parameters a statement in old builds


def select_in(
    connection: sa.Connection, query: sa.Select[Any], column: Any, values: Sequence[int]
) -> list[sa.Row[Any]]:
    """All rows of `query` whose `column` is one of `values`, however many there are."""
    rows: list[sa.Row[Any]] = []
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        rows += connection.execute(query.where(column.in_(chunk))).all()
    return rows


def list_runs(connection: sa.Connection) -> list[RunInfo]:
    """All runs, oldest first."""
    query = sa.select(t.runs).order_by(t.runs.c.created_at, t.runs.c.run_id)
    return [
        RunInfo(r.run_id, r.created_at, r.head_seq, bytes(r.head_chain))
        for r in connection.execute(query)
    ]


def list_branches(connection: sa.Connection, run_id: str) -> list[BranchInfo]:
    """All branches of a run: the first one, then in the order in which they were begun."""
    heads = (
        sa.select(t.commits.c.branch, sa.func.max(t.commits.c.last_seq).label("head"))
        .where(t.commits.c.run_id == run_id)
        .group_by(t.commits.c.branch)
        .subquery()
    )
    b = t.branches
    query = (
        sa.select(b, heads.c.head)
        .outerjoin(heads, heads.c.branch == b.c.name)
        .where(b.c.run_id == run_id)
        .order_by(sa.func.coalesce(b.c.seq, 0), b.c.name)
    )
    return [
        BranchInfo(
            run_id=r.run_id,
            name=r.name,
            parent=r.parent,
            fork_seq=r.fork_seq,
            fork_version=r.fork_version,
            seq=r.seq,
            head_seq=r.head if r.head is not None else (r.fork_seq or 0),
        )
        for r in connection.execute(query)
    ]


def list_versions(
    connection: sa.Connection, weight_version: int | None = None, run_id: str | None = None
) -> list[VersionInfo]:
    """Weight versions by run and number; only those asked for."""
    v = t.versions
    query = sa.select(v).order_by(v.c.run_id, v.c.weight_version)
    if run_id is not None:
        query = query.where(v.c.run_id == run_id)
    if weight_version is not None:
        query = query.where(v.c.weight_version == weight_version)
    return [
        VersionInfo(
            run_id=r.run_id,
            weight_version=r.weight_version,
            parent_version=r.parent_version,
            branch=r.branch,
            step=r.step,
            root=bytes(r.root),
            seq=r.seq,
        )
        for r in connection.execute(query)
    ]


def ancestry(connection: sa.Connection, run_id: str, branch: str) -> list[tuple[str, int | None]]:
    """The branch and its ancestors, each with the last sequence number that is seen of it.

    None: all of it. An ancestor's limit is the smallest of the forks on the way to it.

    Raises:
        NotFound: the branch is not there.
    """
    rows = connection.execute(
        sa.select(t.branches.c.name, t.branches.c.parent, t.branches.c.fork_seq).where(
            t.branches.c.run_id == run_id
        )
    ).all()
    by_name = {row.name: row for row in rows}
    lineage: list[tuple[str, int | None]] = []
    name: str | None = branch
    limit: int | None = None
    while name is not None:
        row = by_name.get(name)
        if row is None:
            raise NotFound(
                explain(
                    "a branch was not found",
                    on=f"run {run_id!r}",
                    expected=f"one of {sorted(by_name)}",
                    found=repr(name),
                )
            )
        lineage.append((name, limit))
        if row.fork_seq is not None:
            limit = row.fork_seq if limit is None else min(limit, row.fork_seq)
        name = row.parent
    return lineage


def segments_after(
    connection: sa.Connection, run_id: str, seq: int, *, up_to: int | None = None
) -> list[SegmentInfo]:
    """The segments of a run that begin after `seq` (and at or before `up_to`), in order.

    Each with where it lies now.
    """
    s, loc = t.segments.c, t.locations.c
    # In this order: a large ledger has many, and access by name would take longer than the query.
    columns = (
        *(s.run_id, s.first_seq, s.rows, s.kind, s.layout, s.branch, s.commit_seq),
        *(s.logical_hash, s.chain, loc.path, loc.format, loc.row_offset, loc.rows),
        *(loc.file_hash, loc.size_bytes),
        *(s[f"{end}_{name}"] for name in t.RANGES for end in ("min", "max")),
    )
    query = (
        sa.select(*columns)
        .select_from(t.segments)
        .outerjoin(t.locations, (loc.run_id == s.run_id) & (loc.first_seq == s.first_seq))
        .where(s.run_id == run_id, s.first_seq > seq)
        .order_by(s.first_seq)
    )
    if up_to is not None:
        query = query.where(s.first_seq <= up_to)
    return [_segment(*row) for row in connection.execute(query).all()]


def _segment(
    run_id: str,
    first_seq: int,
    rows: int,
    kind: str,
    layout: int,
    branch: str,
    commit_seq: int,
    logical_hash: bytes,
    chain: bytes,
    path: str | None,
    format_: str,
    row_offset: int,
    file_rows: int,
    file_hash: bytes,
    size_bytes: int,
    *ends: int | None,
) -> SegmentInfo:
    file = None
    if path is not None:
        file = SegmentFile(path, format_, row_offset, file_rows, bytes(file_hash), size_bytes)
    ranges: dict[str, tuple[int, int]] = {}
    for name, low, high in zip(t.RANGES, ends[::2], ends[1::2], strict=True):
        if low is not None and high is not None:
            ranges[name] = (low, high)
    return SegmentInfo(
        run_id,
        first_seq,
        rows,
        kind,
        layout,
        branch,
        commit_seq,
        bytes(logical_hash),
        bytes(chain),
        ranges,
        file,
    )
