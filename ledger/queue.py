"""Appending without waiting: a bounded queue, and one thread that delivers in order.

    with ledger.queued_writer(run_id, producer="rollout-0") as queue:
        future = queue.append(events)       # returns at once
        ...
        queue.flush()                       # all that was appended is durable now

What an append was told is true: a `Receipt` means durable in the ledger, a `SpilledReceipt` durable
on this machine's disk only, an error that nothing is promised. docs/writing.md has the whole of it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from ledger.catalog.records import Receipt
from ledger.errors import Corrupt, InvalidArgument, LedgerError, StorageFailed, explain
from ledger.fields import Event
from ledger.gaps import Lost, find_stored, gap_events, still_missing
from ledger.invariants import check_rows
from ledger.queue_core import Damaged, QueueCore
from ledger.queue_items import Acknowledgement, Gap, Item, QueueLimits, QueueState, QueueStats
from ledger.spill import SpillFile, SpillFolder
from ledger.spill_recovery import recover
from ledger.writer import Writer, encode_append

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["QueuedWriter"]

_AT_EXIT_S = 30.0
"""How long the end of the interpreter waits for a queue that nobody closed."""


class QueuedWriter:
    """One producer's appends, in order, each exactly once. Threads may share it."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        producer: str,
        limits: QueueLimits,
        spill: str | Path | None,
        on_trouble: Callable[[LedgerError], None] | None,
    ) -> None:
        """See `Ledger.queued_writer`."""
        if limits.policy not in ("stop", "spill") or (limits.spills and spill is None):
            raise InvalidArgument(
                explain(
                    "a queue was not made",
                    on="policy",
                    expected="'stop', or 'spill' with a folder on local disk as spill",
                    found=f"{limits.policy!r}, spill {spill!r}",
                )
            )
        if spill is not None and not limits.spills:
            # Whoever names a folder believes that what the store refuses is safe there.
            raise InvalidArgument(
                explain(
                    "a queue was not made",
                    on="spill",
                    expected="policy 'spill' with it",
                    found=f"policy {limits.policy!r}",
                    do="say policy='spill', or leave the folder out",
                )
            )
        limits.require_usable()
        self.run_id, self.branch, self.producer = run_id, branch, producer
        self._ledger = ledger
        self._limits = limits
        self._pid = os.getpid()
        self._gap_writer: Writer | None = None
        self._folder: SpillFolder | None = None
        left: list[Gap] = []
        if spill is not None:
            self._folder = SpillFolder(Path(spill), ledger.ledger_id, run_id, producer)
            self._folder.acquire()
        try:
            if self._folder is not None:
                left = recover(ledger, run_id, producer, self._folder)
            self._writer = ledger.writer(run_id, branch, producer=producer)
        except BaseException:
            if self._folder is not None:
                self._folder.release()
            raise
        self._core = QueueCore(
            f"run {run_id!r}, branch {branch!r}, producer {producer!r}",
            producer,
            branch,
            self._writer.epoch,
            limits,
            self._folder,
            on_trouble,
        )
        with self._core.locked():
            for gap in left:
                self._core.add_gap(gap)
        self._thread = threading.Thread(
            target=self._run, name=f"ledger-queue-{producer}", daemon=True
        )
        self._thread.start()
        _open_queues.add(self)

    def __enter__(self) -> QueuedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except LedgerError as left:
            error.add_note(str(left))  # the first error is the one to look at

    @property
    def epoch(self) -> int:
        """The epoch of the producer that this queue writes under."""
        return self._writer.epoch

    @property
    def state(self) -> QueueState:
        """How it fares now."""
        return self.stats().state

    def stats(self) -> QueueStats:
        """Sizes, ages, and the newest trouble."""
        with self._core.changed:
            return self._core.stats()

    def append(self, events: Sequence[Event]) -> Future[Acknowledgement]:
        """Check and encode events now, store them later; arrays may be reused afterwards.

        The future gives a Receipt once they are durable in the ledger, a SpilledReceipt where they
        were spilled, or raises what kept them out. A full queue makes this wait for
        `block_timeout_s` at most. While a queue spills, this writes to local disk.

        Raises:
            InvalidEvent: an event breaks its layout, or an invariant by itself.
            StorageFailed: the queue is full or has stopped. The events are not in it.
            FencedOff: a newer writer of this producer has begun.
            LedgerError: what else stopped the queue.
            InvalidArgument: the queue is closed or another process's, or there is no event.
        """
        if os.getpid() != self._pid:
            raise InvalidArgument(
                explain(
                    "an append was refused: the queue belongs to the process that forked this one",
                    on=self._core.where,
                    do="open the ledger and make a queue in each process",
                )
            )
        at = _now()
        tables = encode_append(events, self.run_id, self.branch, recorded_at=at)
        check_rows(tables)
        rows = {kind: table.num_rows for kind, table in tables.items()}
        size = sum(table.nbytes for table in tables.values())
        future: Future[Acknowledgement] = Future()
        future.set_running_or_notify_cancel()
        item = Item(tables, rows, size, at, [future], [len(events)])
        until = time.monotonic() + self._limits.block_timeout_s
        with self._core.locked():
            while True:
                left = until - time.monotonic()
                if self._core.add(item, in_time=left > 0):
                    return future
                self._core.changed.wait(left)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the ledger has all that was appended so far, what was spilled included.

        Raises:
            StorageFailed: it has not within `timeout_s`, or the queue has stopped.
            LedgerError: what else stopped the queue.
        """
        core = self._core
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with core.locked():
            last = core.serial
            while core.waiting and core.waiting[0].serial < last:
                if core.stopped and core.waiting[0].gap is None:
                    break
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise core.left(f"a queue was not emptied within {timeout_s} s")
                core.changed.wait(left)
            if core.stopped:
                core.require_going()

    def close(self, timeout_s: float = 60.0) -> None:
        """Store what waits, then end. Afterwards nothing is appended; a second call does nothing.

        Raises:
            StorageFailed: something was not stored; the message says what, and where it is.
            LedgerError: what stopped the queue.
        """
        if self._core.closed:
            return
        trouble: LedgerError | None = None
        try:
            self.flush(timeout_s)
        except LedgerError as error:
            trouble = error
        with self._core.locked():
            if self._limits.spills:
                try:
                    self._core.spill()
                except StorageFailed as error:
                    trouble = error
            trouble = self._core.close() or trouble
        self._thread.join(1.0)
        if self._folder is not None and not self._thread.is_alive():
            self._folder.release()
        _open_queues.discard(self)
        if trouble is not None:
            raise trouble

    def resume(self) -> list[Future[Acknowledgement]]:
        """Go on after what stopped the queue was mended: what is queued keeps its keys and order.

        Gives a new future for each append whose future failed when the queue stopped, in order.

        Raises:
            FencedOff: a newer writer of this producer has begun; this one cannot go on.
            InvalidArgument: the queue is closed.
        """
        with self._core.locked():
            return self._core.resume()

    def abandon(self, reason: str, events: Sequence[Event] = ()) -> None:
        """Give up what a stopped queue holds, and go on. The ledger will say what is missing.

        A gap_recorded event with kinds, counts, numbers, times and `reason` is appended as soon as
        the ledger takes it. Spilled files are set aside, not deleted. `events` are some that the
        caller holds, because their append was refused, and gives up as well.

        Raises:
            InvalidArgument: the queue has not stopped, or is closed.
            StorageFailed: the spill folder cannot be written.
        """
        rows: dict[str, int] = {}
        for event in events:
            rows[event.KIND] = rows.get(event.KIND, 0) + 1
        held = Lost(self.producer, self.epoch, None, rows, _now()) if rows else None
        with self._core.locked():
            self._core.abandon(reason, held)

    def _run(self) -> None:
        core = self._core
        while True:
            with core.locked():
                while (item := core.take()) is None:
                    if core.closed:
                        return
                    core.changed.wait(core.pause())
                if core.closed:
                    return
                tables, file = item.tables, item.file
            try:
                if item.gap is not None:
                    self._record(item, item.gap)
                    receipts = []
                else:
                    receipts = item.receipts(self._store(item, tables, file))
            except LedgerError as error:
                with core.locked():
                    core.failed(item, error)
            except Exception as error:
                # Nothing that a store may raise: the queue stops rather than guess.
                foreign = StorageFailed(
                    explain("an append was not stored", on=core.where, found=repr(error))
                )
                foreign.__cause__ = error
                with core.locked():
                    core.stop(foreign)
            else:
                with core.locked():
                    core.stored(item, receipts)
                    file = item.file
                if file is not None and self._folder is not None:
                    # Should it stay: the next queue finds that the ledger has it, and removes it.
                    with contextlib.suppress(StorageFailed):
                        self._folder.remove(file)

    def _store(
        self, item: Item, tables: Mapping[str, pa.Table] | None, file: SpillFile | None
    ) -> Receipt:
        if tables is None:
            if file is None or self._folder is None:
                raise Corrupt(explain("a queued append has no events", on=self._core.where))
            try:
                tables = self._folder.read(file)[1]
            except Corrupt as error:
                stored = find_stored(
                    self._ledger, self.run_id, self.producer, file.epoch, file.number
                )
                if stored is None:
                    raise Damaged(str(error)) from error
                return stored
        return self._writer.append_tables(tables, producer_seq=item.number)

    def _record(self, item: Item, gap: Gap) -> None:
        """Append what `gap` says, unless the ledger knows it already, and set its files aside."""
        if item.tables is None:
            missing = still_missing(self._ledger, self.run_id, gap.lost)
            if missing:
                events = gap_events(missing, gap.reason)
                item.tables = encode_append(events, self.run_id, self.branch, recorded_at=_now())
        if item.tables is not None:
            writer = self._writer
            if self._core.fenced:
                # Under the producer's own name a fenced writer may say nothing any more.
                if self._gap_writer is None:
                    self._gap_writer = self._ledger.writer(
                        self.run_id, self.branch, producer=f"{self.producer}:gaps"
                    )
                writer = self._gap_writer
            writer.append_tables(item.tables, producer_seq=item.number)
        for file in gap.files:
            if self._folder is not None:
                self._folder.set_aside(file)


def _now() -> int:
    return time.time_ns() // 1000


_open_queues: set[QueuedWriter] = set()


def _at_exit() -> None:
    """Store what the program left in queues that it did not close; say so where that fails."""
    for queue in list(_open_queues):
        if queue._pid != os.getpid():
            continue
        try:
            queue.close(_AT_EXIT_S)
        except LedgerError as error:
            print(f"a queue was never closed, and {error}", file=sys.stderr, flush=True)


# Before the thread pools end, without which nothing can be stored; atexit itself comes after that.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
