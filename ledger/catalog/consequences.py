"""What a commit adds to branches, versions and consumption, and when it may not."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import ancestry, select_in
from ledger.catalog.records import Consumed, Forked, PendingCommit, Published
from ledger.errors import AlreadyExists, Conflict, NotFound, explain

__all__ = ["add_branch", "add_consumption", "add_version"]


def _branch_exists(connection: sa.Connection, run_id: str, name: str) -> bool:
    query = sa.select(t.branches.c.name).where(
        t.branches.c.run_id == run_id, t.branches.c.name == name
    )
    return connection.execute(query).first() is not None


def add_branch(
    connection: sa.Connection, run_id: str, forked: Forked, base: int, head_seq: int
) -> None:
    """Begin a branch; `base` is the first seq of its commit, `head_seq` the one before.

    Raises:
        AlreadyExists, NotFound, Conflict: it, its parent or where it begins cannot be.
    """
    where = f"run {run_id!r}, branch {forked.branch!r}"
    if _branch_exists(connection, run_id, forked.branch):
        raise AlreadyExists(
            explain("a branch was not begun: it is there already", on=where, do="name it otherwise")
        )
    if not _branch_exists(connection, run_id, forked.parent):
        raise NotFound(
            explain(
                "a branch was not begun: its parent is not there", on=where, found=forked.parent
            )
        )
    if not 0 <= forked.fork_seq <= head_seq:
        raise Conflict(
            explain(
                "a branch was not begun: it leaves its parent at an event that is not there",
                on=where,
                expected=f"fork_seq from 0 to {head_seq}",
                found=forked.fork_seq,
            )
        )
    if forked.weight_version not in _known_versions(connection, run_id, [forked.weight_version]):
        raise Conflict(
            explain(
                "a branch was not begun: its weight version was never published",
                on=where,
                found=f"version {forked.weight_version}",
            )
        )
    connection.execute(
        t.branches.insert().values(
            run_id=run_id,
            name=forked.branch,
            parent=forked.parent,
            fork_seq=forked.fork_seq,
            fork_version=forked.weight_version,
            seq=base + forked.offset,
        )
    )


def _known_versions(
    connection: sa.Connection, run_id: str, versions: Sequence[int]
) -> dict[int, str]:
    """Version → branch, for those of `versions` that the run has."""
    rows = select_in(
        connection,
        sa.select(t.versions.c.weight_version, t.versions.c.branch).where(
            t.versions.c.run_id == run_id
        ),
        t.versions.c.weight_version,
        versions,
    )
    return {int(row.weight_version): row.branch for row in rows}


def add_version(
    connection: sa.Connection, pending: PendingCommit, published: Published, base: int
) -> None:
    """Note a new version; `base` is the first seq of its commit.

    Raises:
        Conflict: it is there already, or its parent is not.
    """
    version, parent = published.weight_version, published.parent_version
    where = f"run {pending.run_id!r}, weight version {version}"
    known = _known_versions(
        connection, pending.run_id, [version] if parent is None else [version, parent]
    )
    if version in known:
        raise Conflict(
            explain(
                "weights were not published: the version is there already",
                on=where,
                expected="a version that is new in the run",
                found=f"published on branch {known[version]!r}",
                do="number versions with ledger.numbering, by the branch",
            )
        )
    if parent is not None and parent not in known:
        raise Conflict(
            explain(
                "weights were not published: their parent version is not there",
                on=where,
                expected="a parent that was published before",
                found=f"version {parent}",
            )
        )
    if parent is None:
        first = connection.execute(
            sa.select(sa.func.min(t.versions.c.weight_version)).where(
                t.versions.c.run_id == pending.run_id
            )
        ).scalar()
        if first is not None:
            raise Conflict(
                explain(
                    "weights were not published: only a run's first version has no parent",
                    on=where,
                    expected="a parent version",
                    found=f"none, and version {first} is there already",
                )
            )
    connection.execute(
        t.versions.insert().values(
            run_id=pending.run_id,
            weight_version=version,
            parent_version=parent,
            branch=pending.branch,
            step=published.step,
            root=published.root,
            seq=base + published.offset,
        )
    )


def add_consumption(
    connection: sa.Connection, pending: PendingCommit, consumed: Consumed, base: int
) -> None:
    """Note what a step trained on.

    Raises:
        Conflict: its lineage has trained on one of the samples before.
    """
    if not consumed.indices:
        return
    lineage = ancestry(connection, pending.run_id, pending.branch)
    visible = sa.or_(
        *(
            (t.consumption.c.branch == name)
            if limit is None
            else (t.consumption.c.branch == name) & (t.consumption.c.seq <= limit)
            for name, limit in lineage
        )
    )
    taken = select_in(
        connection,
        sa.select(t.consumption).where(t.consumption.c.run_id == pending.run_id, visible),
        t.consumption.c.sample_index,
        consumed.indices,
    )
    if taken:
        first = min(taken, key=lambda row: row.sample_index)
        raise Conflict(
            explain(
                f"a step was not committed: {len(taken)} of its samples were trained on before",
                on=f"run {pending.run_id!r}, branch {pending.branch!r}, sample "
                f"{first.sample_index}",
                expected="samples that no earlier step of the lineage consumed",
                found=f"step {consumed.step} wants it; step {first.step} on branch "
                f"{first.branch!r} consumed it",
            )
        )
    connection.execute(
        t.consumption.insert(),
        [
            {
                "run_id": pending.run_id,
                "branch": pending.branch,
                "sample_index": index,
                "step": consumed.step,
                "seq": base + consumed.offset,
            }
            for index in consumed.indices
        ],
    )
