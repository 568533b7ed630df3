"""The state of a queued writer, and how it changes. Every method is called with the lock held."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any

from ledger.errors import (
    Conflict,
    Corrupt,
    FencedOff,
    InvalidArgument,
    LedgerError,
    StorageFailed,
    explain,
)
from ledger.gaps import Lost
from ledger.queue_items import (
    Gap,
    Item,
    QueueLimits,
    QueueState,
    QueueStats,
    SpilledReceipt,
    merge,
)
from ledger.queue_messages import has_stopped, left_waiting, queue_full, spill_full
from ledger.spill import SpillFolder

__all__ = ["Damaged", "QueueCore"]

_COMMIT_BYTES = 8 << 20
"""Appends are merged into one commit up to this size."""
_PAUSES_S = (0.05, 2.0)
"""First and longest pause between two attempts."""


class Damaged(Corrupt):
    """The spilled file of the append at hand is damaged, and the ledger does not have it."""


class QueueCore:
    """What waits, in order, and what became of the rest."""

    def __init__(
        self,
        where: str,
        producer: str,
        branch: str,
        epoch: int,
        limits: QueueLimits,
        folder: SpillFolder | None,
        on_trouble: Callable[[LedgerError], None] | None,
    ) -> None:
        self.where = where
        self.changed = threading.Condition()
        self.waiting: deque[Item] = deque()
        self.error: LedgerError | None = None
        """The newest trouble; what stopped the queue, where it has."""
        self.stopped = self.closed = False
        self.serial = 0
        self._producer = producer
        self._branch = branch
        self._epoch = epoch
        self._limits = limits
        self._folder = folder
        self._on_trouble = on_trouble
        self._number = 0
        self._bytes = self._events = 0
        self._spilled = self._spilled_bytes = 0
        self._stored_appends = self._stored_events = 0
        self._failing_since: float | None = None
        self._progress_at = time.monotonic()
        self._not_before = 0.0
        self._pause_s = _PAUSES_S[0]
        self._calls: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; afterwards, without it, tell futures and callers what has changed."""
        calls: list[Callable[[], object]] = []
        try:
            with self.changed:
                try:
                    yield
                finally:
                    self.changed.notify_all()
                    calls, self._calls = self._calls, []
        finally:
            for call in calls:
                call()

    @property
    def fenced(self) -> bool:
        return self.stopped and isinstance(self.error, FencedOff)

    def stats(self) -> QueueStats:
        if self.closed:
            state = QueueState.CLOSED
        elif self.stopped:
            state = QueueState.STOPPED
        elif self._spilled:
            state = QueueState.SPILLING
        else:
            state = QueueState.RUNNING if self._failing_since is None else QueueState.RETRYING
        return QueueStats(
            state,
            sum(max(1, len(item.futures)) for item in self.waiting),
            sum(item.events for item in self.waiting),
            self._bytes,
            time.monotonic() - self.waiting[0].added_at if self.waiting else 0.0,
            self._spilled,
            self._spilled_bytes,
            self._stored_appends,
            self._stored_events,
            None if self.error is None else str(self.error),
        )

    def require_going(self) -> None:
        """Raises: what stopped the queue; InvalidArgument where it is closed."""
        if self.closed:
            raise InvalidArgument(
                explain("an append was refused: its queue is closed", on=self.where)
            )
        if self.stopped and self.error is not None:
            raise has_stopped(self.where, self.error) from self.error

    def _disk_has_room(self, item: Item) -> bool:
        limit = self._limits.max_spill_bytes
        return limit is None or self._spilled_bytes + item.size_bytes <= limit

    # Coming in

    def add(self, item: Item, *, in_time: bool) -> bool:
        """Take an append, on disk where that must be; False where it must wait for room.

        `in_time` is False when there is no time left to wait.

        Raises:
            StorageFailed: it cannot be taken, and is not in the queue.
        """
        self.require_going()
        room = self._events == 0 or (
            self._bytes + item.size_bytes <= self._limits.max_bytes
            and self._events + item.events <= self._limits.max_events
        )
        to_disk = self._limits.spills and (
            self._spilled > 0 or self._out_of_patience() or not (room or in_time)
        )
        if in_time and not (self._disk_has_room(item) if to_disk else room):
            return False
        if not room and not to_disk:
            raise queue_full(self.where, self.stats(), self._limits, item)
        item.serial = self.serial
        self.waiting.append(item)
        self._count(item, 1)
        if to_disk:
            if not self._spilled:
                self._tell(self.left("a queue began to spill: the store is too slow"))
            try:
                self.spill()
            except StorageFailed as error:
                self.waiting.remove(item)
                self._count(item, -1)
                self.stop(error)
                raise
        self.serial += 1
        return True

    def _out_of_patience(self) -> bool:
        """Whether the store has kept something waiting for longer than the caller has patience."""
        if not self.waiting:
            return False
        since = max(self._progress_at, self.waiting[0].added_at)
        return time.monotonic() - since > self._limits.patience_s

    def spill(self) -> None:
        """Put all that waits on disk, in order. What was put there stays there after an error.

        Raises:
            StorageFailed: the folder is full or cannot be written.
        """
        folder = self._folder
        if folder is None:
            return
        for item in self.waiting:
            self._give_number(item)
            if item.file is not None or item.tables is None or item.gap is not None:
                continue
            if not self._disk_has_room(item):
                raise spill_full(folder.folder, self._spilled_bytes, self._limits, item)
            number = -1 if item.number is None else item.number
            file = folder.write(item.tables, self._branch, self._epoch, number, item.at)
            self._count(item, -1)
            item.file, item.tables, item.parts = file, None, []
            self._spilled += 1
            self._spilled_bytes += file.size_bytes
            told, item.futures = item.futures, [_running() for _ in item.futures]
            for future, delivered in zip(told, item.futures, strict=True):
                self._settle(future.set_result, SpilledReceipt(file, delivered))

    def add_gap(self, gap: Gap) -> None:
        """Have something recorded as missing."""
        self.waiting.append(_gap_item(gap, self.serial))
        self.serial += 1

    # Going out

    def take(self) -> Item | None:
        """The item to deliver now, with its number; None where there is none at the moment."""
        if not self.waiting or (self.stopped and self.waiting[0].gap is None):
            return None
        if self._not_before > time.monotonic():
            return None
        item = merge(self.waiting, _COMMIT_BYTES)
        if item.parts and item is not self.waiting[0]:
            for _ in item.parts:
                self.waiting.popleft()
            self.waiting.appendleft(item)
        self._give_number(item)
        return item

    def pause(self) -> float | None:
        """How long there is nothing to do, in seconds; None: until something changes."""
        if not self.waiting or (self.stopped and self.waiting[0].gap is None):
            return None
        return max(0.0, self._not_before - time.monotonic())

    def stored(self, item: Item, receipts: list[Any]) -> None:
        """The ledger has the item; `receipts`, one an append."""
        self.waiting.remove(item)
        if item.file is None:
            self._count(item, -1)
        else:
            self._spilled -= 1
            self._spilled_bytes -= item.file.size_bytes
        if item.gap is None:
            self._stored_appends += len(item.futures)
            self._stored_events += item.events
            for future, receipt in zip(item.futures, receipts, strict=True):
                self._settle(future.set_result, receipt)
        self._failing_since, self._progress_at = None, time.monotonic()
        self._not_before, self._pause_s = 0.0, _PAUSES_S[0]
        if item.gap is not None and item.gap.then_stop is not None:
            self.stop(item.gap.then_stop)

    def failed(self, item: Item, error: LedgerError) -> None:
        """The ledger did not take the item: try again, split it, spill, or stop."""
        if isinstance(error, FencedOff):
            self._fence(error)
        elif isinstance(error, Damaged):
            damage = Corrupt(str(error))
            name = "" if item.file is None else item.file.path.name
            gap = Gap([], f"a spilled file was damaged: {name}", [], damage)
            self._lose(gap, item, damage)
            at = self.waiting.index(item)
            self.waiting[at] = _gap_item(gap, item.serial)
        elif isinstance(error, StorageFailed):
            self._try_again(item, error)
        elif item.parts and item.file is None:
            # Each append by itself, so that the error is of the right one.
            self.waiting.remove(item)
            for part in reversed(item.parts):
                part.alone = True
                self.waiting.appendleft(part)
        elif item.gap is not None:
            self._try_again(item, error)
        else:
            self.stop(error)

    def _try_again(self, item: Item, error: LedgerError) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self.error = error
        if now - self._failing_since >= self._limits.patience_s and item.gap is None:
            if not self._limits.spills:
                self.stop(error)
                return
            if item.file is None:
                self._tell(error)
                try:
                    self.spill()
                except StorageFailed as full:
                    self.stop(full)
                    return
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])

    def stop(self, error: LedgerError) -> None:
        """Nothing more is taken or delivered. What is queued stays, but its futures fail."""
        self.stopped, self.error = True, error
        for item in self.waiting:
            if item.file is None:
                self._fail(item, error)
        self._tell(error)

    def _fence(self, error: FencedOff) -> None:
        """Nothing can be appended any more. What was acknowledged as spilled becomes a gap."""
        self.stopped, self.error = True, error
        gap = Gap([], "a newer writer of the producer began before these were delivered", [])
        waited, self.waiting = self.waiting, deque()
        for item in waited:
            if item.gap is not None:
                self.waiting.append(item)
            elif item.file is not None:
                self._lose(gap, item, error)
            else:
                self._count(item, -1)
                self._fail(item, error)
        if gap.lost:
            self.add_gap(gap)
        self._tell(error)

    # What callers decide

    def resume(self) -> list[Future[Any]]:
        """Deliver again. New futures of those whose futures failed."""
        if self.closed or self.fenced:
            self.require_going()
        futures: list[Future[Any]] = []
        for item in self.waiting:
            if item.file is None and item.gap is None:
                item.futures = [_running() if f.done() else f for f in item.futures]
                futures += item.futures
                for part, future in zip(item.parts, item.futures, strict=bool(item.parts)):
                    part.futures = [future]
        self._go_on()
        return futures

    def abandon(self, reason: str, held: Lost | None) -> None:
        """Replace all that waits by a gap. Raises: InvalidArgument, StorageFailed."""
        if not self.stopped or self.closed:
            raise InvalidArgument(
                explain(
                    "nothing was abandoned: only what a stopped queue holds can be",
                    on=self.where,
                    found=f"state {self.stats().state}",
                )
            )
        gap = Gap([] if held is None else [held], reason, [])
        given_up = Conflict(explain("events were given up", on=self.where, found=reason))
        if self._folder is not None:
            for item in self.waiting:
                if item.file is not None:
                    item.file = self._folder.give_up(item.file)
        waited, self.waiting = self.waiting, deque()
        for item in waited:
            if item.gap is None:
                self._lose(gap, item, given_up)
            else:
                self.waiting.append(item)
        if gap.lost:
            self.add_gap(gap)
        if not self.fenced:
            self._go_on()

    def close(self) -> LedgerError | None:
        """End; the error that says what the ledger lacks, if anything."""
        self.closed = True
        if not self.waiting:
            return None
        left = self.left("a queue was closed with events that the ledger does not have")
        for item in self.waiting:
            self._fail(item, left)
        return left

    def left(self, tried: str) -> StorageFailed:
        """The error that says what waits, why, and where."""
        folder = None if self._folder is None else self._folder.folder
        return left_waiting(tried, self.where, self.stats(), folder)

    def _lose(self, gap: Gap, item: Item, error: LedgerError) -> None:
        """Move a waiting item into a gap."""
        gap.lost.append(Lost(self._producer, self._epoch, item.number, item.rows, item.at))
        if item.file is None:
            self._count(item, -1)
        else:
            gap.files.append(item.file)
            self._spilled -= 1
            self._spilled_bytes -= item.file.size_bytes
        self._fail(item, error)

    def _go_on(self) -> None:
        self.stopped, self._failing_since, self._not_before = False, None, 0.0
        self._pause_s, self._progress_at = _PAUSES_S[0], time.monotonic()

    def _give_number(self, item: Item) -> None:
        if item.number is None:
            item.number = self._number
            self._number += 1

    def _count(self, item: Item, sign: int) -> None:
        if item.gap is None:
            self._bytes += sign * item.size_bytes
            self._events += sign * item.events

    def _settle(self, end: Callable[[Any], None], value: object) -> None:
        def call() -> None:
            # It may have failed already: a queue that stops fails what waits for its thread too.
            with contextlib.suppress(InvalidStateError):
                end(value)

        self._calls.append(call)

    def _fail(self, item: Item, error: LedgerError) -> None:
        for future in item.futures:
            self._settle(future.set_exception, error)

    def _tell(self, error: LedgerError) -> None:
        tell = self._on_trouble
        if tell is None:
            return

        def call() -> None:
            try:
                tell(error)
            except Exception as broken:
                # It was called for an error, which is seen elsewhere too: it says so there.
                error.add_note(f"on_trouble raised {broken!r}")

        self._calls.append(call)


def _running() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _gap_item(gap: Gap, serial: int) -> Item:
    return Item(None, {}, 0, time.time_ns() // 1000, gap=gap, serial=serial)
