"""The commit point: one transaction that gives an append its place, or does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import ancestry, select_in
from ledger.catalog.records import Consumed, Forked, PendingCommit, Published, Receipt
from ledger.catalog.retire import retire_rows
from ledger.errors import (
    AlreadyExists,
    Conflict,
    FencedOff,
    IdempotencyConflict,
    NotFound,
    explain,
)
from ledger.hashing import chain_link, idempotency_key

__all__ = ["begin_epoch", "commit", "find_receipt", "lock_run"]

# Built once: to put a statement together takes SQLAlchemy longer than SQLite takes to run it.
_run: sa.BindParameter[str] = sa.bindparam("of_run")
_HEAD = (
    sa.select(t.runs.c.head_seq, t.runs.c.head_chain)
    .where(t.runs.c.run_id == _run)
    .with_for_update()
)
_MOVE_HEAD = (
    t.runs.update()
    .where(t.runs.c.run_id == _run)
    .values(head_seq=sa.bindparam("to_seq"), head_chain=sa.bindparam("to_chain"))
)
_EPOCH = sa.select(t.producers.c.epoch).where(
    t.producers.c.run_id == _run, t.producers.c.producer == sa.bindparam("of_producer")
)
_COMMIT_OF_KEY = sa.select(t.commits).where(
    t.commits.c.run_id == _run,
    t.commits.c.producer == sa.bindparam("of_producer"),
    t.commits.c.epoch == sa.bindparam("of_epoch"),
    t.commits.c.producer_seq == sa.bindparam("of_number"),
)
_BRANCH = sa.select(t.branches.c.name).where(
    t.branches.c.run_id == _run, t.branches.c.name == sa.bindparam("of_name")
)
_ADD_COMMIT, _ADD_SEGMENTS, _ADD_LOCATIONS = (
    table.insert() for table in (t.commits, t.segments, t.locations)
)


def lock_run(connection: sa.Connection, run_id: str) -> tuple[int, bytes]:
    """Take the run's head for this transaction; (head_seq, head_chain).

    On PostgreSQL the row is locked; on SQLite the transaction holds the writers' lock already.

    Raises:
        NotFound: no such run.
    """
    row = connection.execute(_HEAD, {"of_run": run_id}).first()
    if row is None:
        raise NotFound(explain("a run was not found", on=run_id))
    return int(row.head_seq), bytes(row.head_chain)


def begin_epoch(connection: sa.Connection, run_id: str, producer: str) -> int:
    """A new epoch of a producer, from 1: writers of its older epochs are fenced off from now on."""
    lock_run(connection, run_id)
    this = (t.producers.c.run_id == run_id) & (t.producers.c.producer == producer)
    epoch = connection.execute(sa.select(t.producers.c.epoch).where(this)).scalar()
    if epoch is None:
        connection.execute(t.producers.insert().values(run_id=run_id, producer=producer, epoch=1))
        return 1
    connection.execute(t.producers.update().where(this).values(epoch=epoch + 1))
    return int(epoch) + 1


def find_receipt(connection: sa.Connection, pending: PendingCommit) -> Receipt | None:
    """The receipt of an earlier commit with the same key and content; None where there is none.

    Raises:
        FencedOff: a newer epoch of the producer has begun.
        IdempotencyConflict: the key is taken by other content.
    """
    of_producer = {"of_run": pending.run_id, "of_producer": pending.producer}
    newest = connection.execute(_EPOCH, of_producer).scalar()
    if newest != pending.epoch:
        raise FencedOff(
            explain(
                "an append was refused: its writer has been replaced",
                on=f"run {pending.run_id!r}, producer {pending.producer!r}",
                expected=f"epoch {newest}, the newest",
                found=f"epoch {pending.epoch}",
                do="stop this process: another one writes under the same producer name",
            )
        )
    key = {"of_epoch": pending.epoch, "of_number": pending.producer_seq}
    row = connection.execute(_COMMIT_OF_KEY, of_producer | key).first()
    if row is None:
        return None
    if bytes(row.content_hash) != pending.content_hash or row.branch != pending.branch:
        raise IdempotencyConflict(
            explain(
                "an append was refused: its key is taken by other content",
                on=f"run {pending.run_id!r}, key "
                + idempotency_key(row.branch, row.producer, row.epoch, row.producer_seq),
                expected=f"content {bytes(row.content_hash).hex()} on branch {row.branch!r}",
                found=f"content {pending.content_hash.hex()} on branch {pending.branch!r}",
                do="give each append its own producer_seq; repeat one only with the same events",
            )
        )
    return Receipt(int(row.first_seq), int(row.last_seq), bytes(row.chain))


def commit(connection: sa.Connection, pending: PendingCommit) -> Receipt:
    """Give the segments their numbers and links, and add them with all that derives from them.

    Every file of `pending` must be durable already. To be called in a write transaction; only its
    end makes the commit.

    Raises:
        FencedOff, IdempotencyConflict: as find_receipt.
        Conflict: a version, branch or sample is taken or unknown; nothing is added.
    """
    head_seq, chain = lock_run(connection, pending.run_id)
    earlier = find_receipt(connection, pending)
    if earlier is not None:
        return earlier
    base = head_seq + 1
    if pending.forked is not None:
        _add_branch(connection, pending.run_id, pending.forked, base, head_seq)
    elif not _branch_exists(connection, pending.run_id, pending.branch):
        raise NotFound(
            explain(
                "an append was refused: its branch is not there",
                on=f"run {pending.run_id!r}, branch {pending.branch!r}",
                do="begin a branch with Ledger.fork",
            )
        )
    key = idempotency_key(pending.branch, pending.producer, pending.epoch, pending.producer_seq)
    segment_rows: list[dict[str, Any]] = []
    location_rows: list[dict[str, Any]] = []
    seq = base
    for s in pending.segments:
        chain = chain_link(chain, seq, s.kind, s.file.rows, s.logical_hash, key)
        row: dict[str, Any] = {
            "run_id": pending.run_id,
            "first_seq": seq,
            "rows": s.file.rows,
            "kind": s.kind,
            "layout": s.layout,
            "branch": pending.branch,
            "commit_seq": base,
            "logical_hash": s.logical_hash,
            "chain": chain,
        }
        for name in t.RANGES:
            row[f"min_{name}"], row[f"max_{name}"] = s.ranges.get(name, (None, None))
        segment_rows.append(row)
        location_rows.append(
            {
                "run_id": pending.run_id,
                "first_seq": seq,
                "path": s.file.path,
                "format": s.file.format,
                "row_offset": s.file.row_offset,
                "rows": s.file.rows,
                "file_hash": s.file.file_hash,
                "size_bytes": s.file.size_bytes,
            }
        )
        seq += s.file.rows
    last = seq - 1
    connection.execute(
        _ADD_COMMIT,
        {
            "run_id": pending.run_id,
            "first_seq": base,
            "last_seq": last,
            "branch": pending.branch,
            "producer": pending.producer,
            "epoch": pending.epoch,
            "producer_seq": pending.producer_seq,
            "content_hash": pending.content_hash,
            "chain": chain,
            "committed_at": pending.committed_at,
        },
    )
    connection.execute(_ADD_SEGMENTS, segment_rows)
    connection.execute(_ADD_LOCATIONS, location_rows)
    for published in pending.published:
        _add_version(connection, pending, published, base)
    for consumed in pending.consumed:
        _add_consumption(connection, pending, consumed, base)
    for retired in pending.retired:
        retire_rows(connection, pending.run_id, pending.branch, retired, base)
    connection.execute(_MOVE_HEAD, {"of_run": pending.run_id, "to_seq": last, "to_chain": chain})
    return Receipt(base, last, chain)


def _branch_exists(connection: sa.Connection, run_id: str, name: str) -> bool:
    return connection.execute(_BRANCH, {"of_run": run_id, "of_name": name}).first() is not None


def _add_branch(
    connection: sa.Connection, run_id: str, forked: Forked, base: int, head_seq: int
) -> None:
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


def _add_version(
    connection: sa.Connection, pending: PendingCommit, published: Published, base: int
) -> None:
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


def _add_consumption(
    connection: sa.Connection, pending: PendingCommit, consumed: Consumed, base: int
) -> None:
    """Note what a step trained on; refuse a sample that its lineage has trained on before."""
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
