"""Appending: events become durable files, then one transaction makes them part of the ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledger.appending import (
    Appending,
    by_kind,
    content_hash,
    encode_append,
    is_packable,
    pending_of,
)
from ledger.catalog.commit import find_receipt, is_taken
from ledger.catalog.derive import derive, ranges_of
from ledger.catalog.records import PendingSegment, Receipt
from ledger.commit_queue import CommitQueue
from ledger.encode import require_layout
from ledger.encode_plain import Fill
from ledger.errors import InvalidArgument, explain
from ledger.fields import Event
from ledger.hashing import column_digests, digest_of_columns
from ledger.invariants import check_tables
from ledger.keys import require_number
from ledger.schema import table_layout
from ledger.segment import PiecesToFill, SegmentFile, hot_folder, segment_file, serialise

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Writer", "content_hash", "encode_append"]


class Writer:
    """One epoch of one producer on one branch. Threads may share it.

    Appends of several threads, by this writer or by others of the process to the same run, are
    stored together: one sync takes all that wait.
    """

    def __init__(self, ledger: Ledger, run_id: str, branch: str, producer: str, epoch: int) -> None:
        self.run_id = run_id
        self.branch = branch
        self.producer = producer
        self.epoch = epoch
        self._ledger = ledger
        self._next = 0
        self._closed = False
        self._unsure: list[Appending] = []
        """Appends of which it is not known whether they were committed."""
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
        append that failed or whose acknowledgement was lost can simply be repeated, with its number
        or without one.

        Raises:
            InvalidEvent: an event breaks its layout or an invariant.
            FencedOff: a newer writer of this producer has begun.
            IdempotencyConflict: the number was used for other events.
            Conflict: a version, branch or sample is taken or unknown.
            StorageFailed: the store or the catalog did not take it.
        """
        self._require_open()
        if producer_seq is not None:
            producer_seq = require_number("producer_seq", producer_seq)
        groups = by_kind(events)
        if self._packs(groups, producer_seq):
            return self._in_turn(producer_seq, self._queue.submit, events=groups)
        now = time.time_ns() // 1000
        # The disk takes the first bytes before the last ones are encoded.
        later: list[Fill] = []
        tables = encode_append(events, self.run_id, self.branch, recorded_at=now, later=later)
        return self._append_alone(tables, producer_seq, later)

    def append_tables(
        self, tables: Mapping[str, pa.Table], *, producer_seq: int | None = None
    ) -> Receipt:
        """As `append`, of events that `encode_append` has made tables of. Raises what it raises."""
        self._require_open()
        if producer_seq is not None:
            producer_seq = require_number("producer_seq", producer_seq)
        require_layout(tables)
        if self._packs(tables, producer_seq):
            return self._in_turn(producer_seq, self._queue.submit, tables=tables)
        return self._append_alone(tables, producer_seq, [])

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgument(
                explain("an append was refused: its writer is closed", on=self.producer)
            )

    @property
    def _queue(self) -> CommitQueue:
        return self._ledger.commit_queue(self.run_id)

    def _packs(
        self, groups: Mapping[str, Sequence[Event] | pa.Table], producer_seq: int | None
    ) -> bool:
        """Whether an append may share files with others. A repetition is not stored again."""
        if self._unsure or not is_packable(groups):
            return False
        if producer_seq is None:
            return True
        with self._ledger.catalog.read_statement() as driver:
            return not is_taken(driver, self.run_id, self.producer, self.epoch, producer_seq)

    def _in_turn(
        self, producer_seq: int | None, store: Callable[[Appending], Receipt], **rows: Any
    ) -> Receipt:
        """Number an append and store it. After an error its number is free, if nobody can have it.

        Where it may have been committed all the same, the number is remembered with the content, so
        that repeating the append does not store it twice.
        """
        with self._lock:
            number = self._next if producer_seq is None else producer_seq
            raised = number >= self._next
            self._next = max(self._next, number + 1)
        one = Appending(self, number, **rows)
        try:
            receipt = store(one)
        except BaseException:
            with self._lock:
                if one.uncertain or one.receipt is not None:
                    self._unsure.append(one)
                elif raised and number == self._next - 1:
                    self._next = number
            raise
        if self._unsure and one.pending is not None:
            self._forget_unsure(one.pending.content_hash)
        return receipt

    def _number_in_doubt(self, content: bytes) -> int | None:
        """The number of an append with this content of which it is not known whether it is stored.

        Those that were never stored are forgotten.
        """
        found = None
        for one in list(self._unsure):
            self._queue.settle(one)
            stored = one.pending is not None and (one.uncertain or one.receipt is not None)
            if not stored:
                with self._lock, contextlib.suppress(ValueError):
                    self._unsure.remove(one)
            elif one.pending is not None and one.pending.content_hash == content:
                found = one.number
        return found

    def _forget_unsure(self, content: bytes) -> None:
        """An append with this content is stored, and its receipt known."""
        with self._lock:
            self._unsure = [
                one
                for one in self._unsure
                if one.pending is None or one.pending.content_hash != content
            ]

    def _append_alone(
        self, tables: Mapping[str, pa.Table], producer_seq: int | None, later: Sequence[Fill]
    ) -> Receipt:
        """Store an append in files of its own, by this thread; only its commit is shared."""
        if self._unsure and producer_seq is None:
            for fill in later:
                fill.run()
            later = ()
            digests = {kind: column_digests(table) for kind, table in tables.items()}
            producer_seq = self._number_in_doubt(content_hash(tables, digests))
        repeated = producer_seq is not None
        return self._in_turn(
            producer_seq, lambda one: self._store_alone(one, later, repeated), tables=tables
        )

    def _store_alone(self, one: Appending, later: Sequence[Fill], repeated: bool) -> Receipt:
        tables = one.tables or {}
        store = self._ledger.store
        # The disk takes the bytes while they are hashed and checked; they get a name, and so become
        # part of the store, only after that.
        pieces: list[Sequence[Any]] = [
            serialise(table, one.identity(part)) for part, table in enumerate(tables.values())
        ]
        if later:
            pieces = [PiecesToFill(of_file, later) for of_file in pieces]
        folders = [hot_folder(self.run_id, kind) for kind in tables]
        staged = store.stage(list(zip(folders, pieces, strict=True)))
        try:
            for fill in later:
                fill.run()
            digests = {kind: column_digests(table) for kind, table in tables.items()}
            pending = pending_of(
                one, content_hash(tables, digests), (), time.time_ns() // 1000, derive(tables)
            )
            if repeated:
                with self._ledger.catalog.read_statement() as driver:
                    earlier = find_receipt(driver, pending)
                if earlier is not None:
                    one.pending = pending
                    store.discard(staged)
                    return earlier
            check_tables(tables, self._ledger.lookup(self.run_id))
            segments = tuple(
                _segment(kind, table, digests[kind], segment_file(folder, table.num_rows, data))
                for (kind, table), folder, data in zip(tables.items(), folders, pieces, strict=True)
            )
            store.publish([(s.file.path, file) for s, file in zip(segments, staged, strict=True)])
            one.pending = dataclasses.replace(pending, segments=segments)
            return self._queue.submit(one)
        except BaseException:
            for fill in later:
                fill.give_up()
            store.discard(staged)
            raise


def _segment(
    kind: str, table: pa.Table, digests: dict[int, bytes], file: SegmentFile
) -> PendingSegment:
    layout = table_layout(table)
    logical = digest_of_columns(kind, layout, table.num_rows, digests)
    return PendingSegment(kind, layout, logical, ranges_of(table), file)
