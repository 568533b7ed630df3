"""The commit point: one transaction that gives appends their places, or does nothing.

A transaction may take the appends of many writers. Each keeps a commit of its own, with its key and
its links in the chain; one that is refused leaves nothing, and the others as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.consequences import add_branch, add_consumption, add_version
from ledger.catalog.driver import Driver, Statement
from ledger.catalog.engine import Catalog
from ledger.catalog.records import PendingCommit, Receipt
from ledger.catalog.retire import retire_rows
from ledger.errors import (
    AlreadyExists,
    Conflict,
    FencedOff,
    IdempotencyConflict,
    LedgerError,
    NotFound,
    explain,
)
from ledger.hashing import chain_link, idempotency_key

__all__ = ["begin_epoch", "commit_all", "find_receipt", "is_taken", "lock_run"]

_run: sa.BindParameter[str] = sa.bindparam("of_run")
_HEAD_QUERY = (
    sa.select(t.runs.c.head_seq, t.runs.c.head_chain)
    .where(t.runs.c.run_id == _run)
    .with_for_update()
)
_HEAD = Statement(_HEAD_QUERY)
_MOVE_HEAD = Statement(
    t.runs.update()
    .where(t.runs.c.run_id == _run)
    .values(head_seq=sa.bindparam("to_seq"), head_chain=sa.bindparam("to_chain"))
)
# Apart from the head: what was committed while PostgreSQL waited for its lock must be seen here.
_STANDING = Statement(
    sa.select(
        t.producers.c.epoch,
        t.branches.c.name,
        t.commits.c.content_hash,
        t.commits.c.branch,
        t.commits.c.first_seq,
        t.commits.c.last_seq,
        t.commits.c.chain,
    )
    .select_from(
        t.producers.outerjoin(
            t.branches,
            (t.branches.c.run_id == t.producers.c.run_id)
            & (t.branches.c.name == sa.bindparam("of_branch")),
        ).outerjoin(
            t.commits,
            (t.commits.c.run_id == t.producers.c.run_id)
            & (t.commits.c.producer == t.producers.c.producer)
            & (t.commits.c.epoch == sa.bindparam("of_epoch"))
            & (t.commits.c.producer_seq == sa.bindparam("of_number")),
        )
    )
    .where(t.producers.c.run_id == _run, t.producers.c.producer == sa.bindparam("of_producer"))
)
_TAKEN = Statement(
    sa.select(t.commits.c.first_seq).where(
        t.commits.c.run_id == _run,
        t.commits.c.producer == sa.bindparam("of_producer"),
        t.commits.c.epoch == sa.bindparam("of_epoch"),
        t.commits.c.producer_seq == sa.bindparam("of_number"),
    )
)
_ADD_COMMIT, _ADD_SEGMENT, _ADD_LOCATION = (
    Statement(table.insert()) for table in (t.commits, t.segments, t.locations)
)


def lock_run(connection: sa.Connection, run_id: str) -> tuple[int, bytes]:
    """Take the run's head for this transaction; (head_seq, head_chain).

    On PostgreSQL the row is locked; on SQLite the transaction holds the writers' lock already.

    Raises:
        NotFound: no such run.
    """
    row = connection.execute(_HEAD_QUERY, {"of_run": run_id}).first()
    if row is None:
        raise _no_run(run_id)
    return int(row.head_seq), bytes(row.head_chain)


def _no_run(run_id: str) -> NotFound:
    return NotFound(explain("a run was not found", on=run_id))


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Earlier:
    """What is committed under a key already."""

    content_hash: bytes
    branch: str
    receipt: Receipt


def find_receipt(driver: Driver, pending: PendingCommit) -> Receipt | None:
    """The receipt of an earlier commit with the same key and content; None where there is none.

    Raises:
        FencedOff: a newer epoch of the producer has begun.
        IdempotencyConflict: the key is taken by other content.
    """
    earlier, _ = _standing(driver, pending)
    return None if earlier is None else _same(pending, earlier)


def is_taken(driver: Driver, run_id: str, producer: str, epoch: int, number: int) -> bool:
    """Whether there is a commit under a key."""
    key = {"of_run": run_id, "of_producer": producer, "of_epoch": epoch, "of_number": number}
    return driver.first(_TAKEN, key) is not None


def _standing(driver: Driver, pending: PendingCommit) -> tuple[_Earlier | None, bool]:
    """What is committed under the key, and whether the branch is there. Raises: FencedOff."""
    row = driver.first(
        _STANDING,
        {
            "of_run": pending.run_id,
            "of_producer": pending.producer,
            "of_branch": pending.branch,
            "of_epoch": pending.epoch,
            "of_number": pending.producer_seq,
        },
    )
    newest = None if row is None else row[0]
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
    _, branch, content_hash, of_branch, first, last, chain = row
    earlier = None
    if first is not None:
        earlier = _Earlier(bytes(content_hash), of_branch, Receipt(first, last, bytes(chain)))
    return earlier, branch is not None


def _same(pending: PendingCommit, earlier: _Earlier) -> Receipt:
    """The earlier receipt, if it was for the same append. Raises: IdempotencyConflict."""
    if (earlier.content_hash, earlier.branch) != (pending.content_hash, pending.branch):
        raise IdempotencyConflict(
            explain(
                "an append was refused: its key is taken by other content",
                on=f"run {pending.run_id!r}, key "
                + idempotency_key(
                    earlier.branch, pending.producer, pending.epoch, pending.producer_seq
                ),
                expected=f"content {earlier.content_hash.hex()} on branch {earlier.branch!r}",
                found=f"content {pending.content_hash.hex()} on branch {pending.branch!r}",
                do="give each append its own producer_seq; repeat one only with the same events",
            )
        )
    return earlier.receipt


def commit_all(
    catalog: Catalog, run_id: str, pendings: Sequence[PendingCommit]
) -> list[Receipt | LedgerError]:
    """Add the commits of `pendings`, in order, after the run's head; what became of each.

    Every file of `pendings` must be durable already. One transaction takes all: on return the
    commits that got receipts are durable. The errors are those of single appends that the catalog
    refuses (FencedOff, IdempotencyConflict, Conflict, NotFound, AlreadyExists).

    Raises:
        NotFound: no such run.
        StorageFailed, Corrupt: the catalog did not take the transaction; nothing was added, or all
            was and only the answer got lost.
    """
    if catalog.kind == "sqlite" and not any(map(_has_consequences, pendings)):
        with catalog.write_directly() as driver:
            return _add_all(driver, None, run_id, pendings)
    # Run again after a lost acknowledgement, it finds its own commits by their keys.
    return catalog.transact(
        lambda connection: _add_all(Driver(connection), connection, run_id, pendings)
    )


def _add_all(
    driver: Driver,
    connection: sa.Connection | None,
    run_id: str,
    pendings: Sequence[PendingCommit],
) -> list[Receipt | LedgerError]:
    batch = _Batch(driver, connection, run_id)
    outcomes: list[Receipt | LedgerError] = []
    for pending in pendings:
        try:
            outcomes.append(batch.add(pending))
        except (AlreadyExists, Conflict, NotFound) as error:
            outcomes.append(error)
    batch.finish()
    return outcomes


def _has_consequences(pending: PendingCommit) -> bool:
    return bool(pending.forked or pending.published or pending.consumed or pending.retired)


class _Batch:
    """The commits of one transaction, numbered and linked one after the other."""

    def __init__(self, driver: Driver, connection: sa.Connection | None, run_id: str) -> None:
        row = driver.first(_HEAD, {"of_run": run_id})
        if row is None:
            raise _no_run(run_id)
        self._driver = driver
        self._connection = connection
        self._run_id = run_id
        self._begun = self._head = int(row[0])
        self._chain = bytes(row[1])
        self._new: dict[tuple[str, int, int], _Earlier] = {}
        self._commits: list[dict[str, Any]] = []
        self._segments: list[dict[str, Any]] = []
        self._locations: list[dict[str, Any]] = []

    def add(self, pending: PendingCommit) -> Receipt:
        """Give an append its place. Raises what refuses it; then it has left nothing."""
        earlier, has_branch = _standing(self._driver, pending)
        key = (pending.producer, pending.epoch, pending.producer_seq)
        earlier = self._new.get(key, earlier)
        if earlier is not None:
            return _same(pending, earlier)
        if pending.forked is None and not has_branch:
            raise NotFound(
                explain(
                    "an append was refused: its branch is not there",
                    on=f"run {pending.run_id!r}, branch {pending.branch!r}",
                    do="begin a branch with Ledger.fork",
                )
            )
        if _has_consequences(pending):
            receipt = self._add_with_consequences(pending)
        else:
            receipt = self._add(pending)
        self._new[key] = _Earlier(pending.content_hash, pending.branch, receipt)
        return receipt

    def _add_with_consequences(self, pending: PendingCommit) -> Receipt:
        connection = self._connection
        if connection is None:
            raise RuntimeError("a commit with consequences was added to a plain transaction")
        self._flush()
        before = self._head, self._chain
        base = self._head + 1
        try:
            # Taken back to here where it is refused: the others of the transaction stay.
            with connection.begin_nested():
                if pending.forked is not None:
                    add_branch(connection, self._run_id, pending.forked, base, self._head)
                receipt = self._add(pending)
                self._flush()
                for published in pending.published:
                    add_version(connection, pending, published, base)
                for consumed in pending.consumed:
                    add_consumption(connection, pending, consumed, base)
                for retired in pending.retired:
                    retire_rows(connection, pending.run_id, pending.branch, retired, base)
        except LedgerError:
            self._head, self._chain = before
            raise
        return receipt

    def _add(self, pending: PendingCommit) -> Receipt:
        key = idempotency_key(pending.branch, pending.producer, pending.epoch, pending.producer_seq)
        base = seq = self._head + 1
        chain = self._chain
        for s in pending.segments:
            chain = chain_link(chain, seq, s.kind, s.file.rows, s.logical_hash, key)
            row: dict[str, Any] = {
                "run_id": self._run_id,
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
            self._segments.append(row)
            self._locations.append(
                {
                    "run_id": self._run_id,
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
        self._commits.append(
            {
                "run_id": self._run_id,
                "first_seq": base,
                "last_seq": last,
                "branch": pending.branch,
                "producer": pending.producer,
                "epoch": pending.epoch,
                "producer_seq": pending.producer_seq,
                "content_hash": pending.content_hash,
                "chain": chain,
                "committed_at": pending.committed_at,
            }
        )
        self._head, self._chain = last, chain
        return Receipt(base, last, chain)

    def _flush(self) -> None:
        self._driver.many(_ADD_COMMIT, self._commits)
        self._driver.many(_ADD_SEGMENT, self._segments)
        self._driver.many(_ADD_LOCATION, self._locations)
        self._commits, self._segments, self._locations = [], [], []

    def finish(self) -> None:
        """Write what is not written yet, and move the run's head."""
        self._flush()
        if self._head != self._begun:
            self._driver.run(
                _MOVE_HEAD,
                {"of_run": self._run_id, "to_seq": self._head, "to_chain": self._chain},
            )
