"""Appending from many coroutines: what waits while one append is stored goes into the next one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ledger.errors import FencedOff, InvalidArgument, LedgerError, StorageFailed, explain
from ledger.fields import Event

__all__ = ["Appender", "EventSink"]

_MOST_EVENTS = 4096
"""Events of one append at most: a failure throws away no more work than that."""

_SHARE = 0.1
"""Of the time that appends may take in the long run. An append costs nearly the same for one event
as for fifty, and computes beside the loop that asks the engines: where many come, they wait for
each other a little and go together."""

_BURST_S = 0.25
"""Seconds that appends may take at once before that share counts: few and far between, or at the
beginning, none of them waits."""


class Appender(Protocol):
    """Where the coroutines of a rollout put their events."""

    async def append(self, events: Sequence[Event]) -> None:
        """Return once `events` are durable. Raises what `ledger.writer.Writer.append` raises."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    events: Sequence[Event]
    stored: asyncio.Future[None]


class EventSink:
    """An `Appender` over a ledger's writer. All calls come from one event loop.

    Events of one call are stored in one commit, in their order; those of calls that wait at the
    same time share it. One thread writes, so calls that follow each other are stored in that order.
    """

    def __init__(
        self, append: Callable[[Sequence[Event]], Any], executor: Executor | None = None
    ) -> None:
        """`append` stores events durably: `Writer.append`. `executor` runs it, one call after the
        other; None: a thread of its own."""
        self._append = append
        self._waiting: list[_Waiting] = []
        self._draining: asyncio.Task[None] | None = None
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="event-sink")
        self._failure: LedgerError | None = None
        self._credit_s, self._credited_at = _BURST_S, -math.inf
        self._closed = False
        self._closing = asyncio.Event()
        self.appends = 0
        """Commits so far."""
        self.events = 0
        """Events in them."""

    async def append(self, events: Sequence[Event]) -> None:
        """Return once `events` are durable; they are even where the caller is cancelled meanwhile.

        Raises what `Writer.append` raises. An event that the ledger refuses is told to its own
        caller alone; once the writer was fenced off or the store failed, every later call fails.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise InvalidArgument(explain("an append was refused: the sink is closed"))
        if not events:
            return
        one = _Waiting(events, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(one.stored)

    async def close(self) -> None:
        """Wait for what was handed over, then refuse more."""
        self._closed = True
        self._closing.set()
        if self._draining is not None:
            await self._draining
        self._thread.shutdown()

    async def _drain(self) -> None:
        while self._waiting:
            taken: list[_Waiting] = []
            count = 0
            while self._waiting and (not taken or count < _MOST_EVENTS):
                one = self._waiting.pop(0)
                taken.append(one)
                count += len(one.events)
            await self._store(taken)
            await self._pace()

    def _timed(self, events: Sequence[Event]) -> float:
        """Store events; the seconds of computing that it took."""
        began = time.thread_time()
        self._append(events)
        return time.thread_time() - began

    async def _pace(self) -> None:
        """Wait until appends have taken no more than their share of the time, or for the end."""
        now = asyncio.get_running_loop().time()
        earned = (now - self._credited_at) * _SHARE
        self._credit_s, self._credited_at = min(self._credit_s + earned, _BURST_S), now
        if self._credit_s < 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), -self._credit_s / _SHARE)

    async def _store(self, taken: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        together = [event for one in taken for event in one.events]
        try:
            if self._failure is not None:
                raise self._failure
            self._credit_s -= await loop.run_in_executor(self._thread, self._timed, together)
        except Exception as error:
            if isinstance(error, (FencedOff, StorageFailed)):
                self._failure = error
            elif len(taken) > 1:
                # Nothing of it was stored: find whose events were refused.
                for one in taken:
                    await self._store([one])
                return
            for one in taken:
                _tell(one, error)
            return
        self.appends += 1
        self.events += len(together)
        for one in taken:
            _tell(one, None)


def _tell(one: _Waiting, error: Exception | None) -> None:
    if one.stored.done():
        return
    if error is None:
        one.stored.set_result(None)
        return
    one.stored.set_exception(error)
    one.stored.exception()  # its caller may have been cancelled: nobody else has to hear of it
