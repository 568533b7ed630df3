"""Appending: events become durable files, then one transaction makes them part of the ledger."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.catalog import commit as commits
from ledger.catalog.derive import derive, ranges_of
from ledger.catalog.records import PendingCommit, PendingSegment, Receipt
from ledger.encode import events_to_table, refuse
from ledger.errors import InvalidArgument, explain
from ledger.fields import EVENTS, Event
from ledger.hashing import column_digests, digest_of_columns
from ledger.invariants import check_tables
from ledger.schema import table_layout
from ledger.segment import Identity, SegmentFile, hot_folder, segment_file, serialise
from ledger.storage import Staged

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Writer", "content_hash", "encode_append"]

_RECORDED_AT = 1000  # the field id of Event.recorded_at


class Writer:
    """One epoch of one producer on one branch. Threads may share it; they take turns."""

    def __init__(self, ledger: Ledger, run_id: str, branch: str, producer: str, epoch: int) -> None:
        self.run_id = run_id
        self.branch = branch
        self.producer = producer
        self.epoch = epoch
        self._ledger = ledger
        self._next = 0
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further appends. Nothing is buffered, so nothing is lost without it."""
        self._closed = True

    def append(self, events: Sequence[Event], *, producer_seq: int | None = None) -> Receipt:
        """Store events in one commit: after success all are durable, after an error none shows.

        Kinds may be mixed: within a kind the order is kept, the kinds follow each other by first
        appearance. `producer_seq` numbers the append within the writer's epoch (counted from 0 if
        left out). Repeating a number with the same events gives the first receipt again, so an
        append that failed or whose acknowledgement was lost can simply be repeated.

        Raises:
            InvalidEvent: an event breaks its layout or an invariant.
            FencedOff: a newer writer of this producer has begun.
            IdempotencyConflict: the number was used for other events.
            Conflict: a version, branch or sample is taken or unknown.
            StorageFailed: the store or the catalog did not take it.
        """
        now = time.time_ns() // 1000
        tables = encode_append(events, self.run_id, self.branch, recorded_at=now)
        return self.append_tables(tables, producer_seq=producer_seq)

    def append_tables(
        self, tables: Mapping[str, pa.Table], *, producer_seq: int | None = None
    ) -> Receipt:
        """As `append`, of events that `encode_append` has made tables of. Raises what it raises."""
        with self._lock:
            if self._closed:
                raise InvalidArgument(
                    explain("an append was refused: its writer is closed", on=self.producer)
                )
            number = self._next if producer_seq is None else producer_seq
            receipt = self._append(tables, number, repeated=producer_seq is not None)
            self._next = max(self._next, number + 1)
            return receipt

    def _append(self, tables: Mapping[str, pa.Table], number: int, *, repeated: bool) -> Receipt:
        now = time.time_ns() // 1000
        # The disk takes the bytes while they are hashed and checked; they get a name, and so become
        # part of the store, only after that.
        pieces = [
            serialise(
                table, Identity(self.run_id, self.branch, self.producer, self.epoch, number, part)
            )
            for part, table in enumerate(tables.values())
        ]
        folders = [hot_folder(self.run_id, kind) for kind in tables]
        store = self._ledger.store
        staged = store.stage(list(zip(folders, pieces, strict=True)))
        try:
            return self._commit(tables, pieces, staged, number, now, repeated=repeated)
        except BaseException:
            store.discard(staged)
            raise

    def _commit(
        self,
        tables: Mapping[str, pa.Table],
        pieces: Sequence[Sequence[Any]],
        staged: Sequence[Staged],
        number: int,
        now: int,
        *,
        repeated: bool,
    ) -> Receipt:
        digests = {kind: column_digests(table) for kind, table in tables.items()}
        derived = derive(tables)
        pending = PendingCommit(
            run_id=self.run_id,
            branch=self.branch,
            producer=self.producer,
            epoch=self.epoch,
            producer_seq=number,
            content_hash=content_hash(tables, digests),
            committed_at=now,
            segments=(),
            forked=derived.forked[0] if derived.forked else None,
            published=derived.published,
            consumed=derived.consumed,
            retired=derived.retired,
        )
        catalog = self._ledger.catalog
        if repeated:
            with catalog.read() as connection:
                earlier = commits.find_receipt(connection, pending)
            if earlier is not None:
                self._ledger.store.discard(staged)
                return earlier
        check_tables(tables, self._ledger.lookup(self.run_id))
        segments = tuple(
            _segment(kind, table, digests[kind], segment_file(one.folder, table.num_rows, data))
            for (kind, table), one, data in zip(tables.items(), staged, pieces, strict=True)
        )
        self._ledger.store.publish(
            [(s.file.path, one) for s, one in zip(segments, staged, strict=True)]
        )
        complete = dataclasses.replace(pending, segments=segments)
        # Run again after a lost acknowledgement, it finds its own commit by the key.
        receipt = catalog.transact(lambda connection: commits.commit(connection, complete))
        self._ledger.exporter.notify(self.run_id)
        return receipt


def _segment(
    kind: str, table: pa.Table, digests: dict[int, bytes], file: SegmentFile
) -> PendingSegment:
    layout = table_layout(table)
    logical = digest_of_columns(kind, layout, table.num_rows, digests)
    return PendingSegment(kind, layout, logical, ranges_of(table), file)


def encode_append(
    events: Sequence[Event], run_id: str, branch: str, *, recorded_at: int
) -> dict[str, pa.Table]:
    """The tables of an append to a branch, by kind in the order of first appearance.

    They share no memory with the events. `recorded_at` is in microseconds since 1970-01-01 UTC.

    Raises:
        InvalidEvent: an event breaks its layout, or names another run or branch.
        InvalidArgument: there are no events, or something that is none.
    """
    groups: dict[str, list[Event]] = {}
    for item in events:
        kind = getattr(type(item), "KIND", None)
        if kind is None or EVENTS.get(kind) is not type(item):
            raise InvalidArgument(
                explain(
                    "an append was refused: it holds something that is no event",
                    expected="instances of the classes in ledger.events",
                    found=type(item).__name__,
                )
            )
        groups.setdefault(kind, []).append(item)
    if not groups:
        raise InvalidArgument(
            explain("an append was refused", expected="at least one event", found="none")
        )
    tables = {
        kind: events_to_table(group, recorded_at=recorded_at) for kind, group in groups.items()
    }
    _require_own_names(tables, run_id, branch)
    return tables


def _require_own_names(tables: Mapping[str, pa.Table], run_id: str, branch: str) -> None:
    """Events that name their run or branch must name the one that they are written to."""
    for field, own in (("run_id", run_id), ("branch", branch)):
        for kind, table in tables.items():
            if field in table.column_names:
                for row, named in enumerate(table.column(field).to_pylist()):
                    if named != own:
                        refuse(kind, row, field, f"{own!r}, which it is written to", repr(named))
    forks = tables.get("branch_forked")
    if forks is not None and forks.num_rows > 1:
        refuse("branch_forked", 1, "branch", "one fork in an append", forks.num_rows)


def content_hash(tables: Mapping[str, pa.Table], digests: Mapping[str, dict[int, bytes]]) -> bytes:
    """What makes two appends the same: everything but the times that the writer filled in."""
    parts = []
    for kind, table in tables.items():
        kept = {field: digest for field, digest in digests[kind].items() if field != _RECORDED_AT}
        parts.append(digest_of_columns(kind, table_layout(table), table.num_rows, kept).hex())
    return blake3(canonical_json(parts).encode()).digest()
