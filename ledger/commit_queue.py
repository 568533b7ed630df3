"""Group commit: one thread at a time stores what all threads of a run have to append.

A thread that finds nobody at work leads: it takes every append that waits, stores the small ones
together, and commits all of them in one transaction. The others wait for their outcome, and one of
those that came meanwhile leads next. So a lone append waits for nobody, and many share the syncs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ledger.appending import Appending, hash_packed, pack
from ledger.catalog.commit import commit_all
from ledger.catalog.records import Receipt
from ledger.errors import InvalidArgument, LedgerError, StorageFailed, explain

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["CommitQueue"]

_MOST = 512
"""Appends that one transaction takes."""
_POLL_S = 0.5
"""How long a thread waits before it looks whether what it waits for will still come."""
_GATHER_S = 0.002
"""How long a leader waits, at most, for as many appends as the last one had."""


class CommitQueue:
    """The appends to one run by the threads of this process."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._lock = threading.Lock()
        self._waiting: list[Appending] = []
        self._led = False
        """Whether some thread leads, or is about to: unless it was interrupted."""
        self._leading = threading.Lock()
        """Held by the thread that leads."""
        self._turn = 0
        """Counts leaders."""
        self._closed = False
        self._process = os.getpid()
        self._last = 1
        """Appends that the last leader had."""
        self._wanted = 0
        """Appends that the present leader waits for."""
        self._enough = threading.Event()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="ledger-commit")

    @property
    def waiting(self) -> int:
        """Appends that wait for a leader."""
        return len(self._waiting)

    def submit(self, one: Appending) -> Receipt:
        """Wait until the append is durable. Raises what refused it, or what the store did.

        An interrupt may come at any point, also to the thread that leads: others go on, if need be
        after `_POLL_S`, and an append of which the outcome is not known is `uncertain`.
        """
        if self._closed or os.getpid() != self._process:
            raise self._refusal()
        one.done.acquire()
        try:
            with self._lock:
                if self._closed:
                    raise self._refusal()
                self._waiting.append(one)
                leads = not self._led
                self._led = True
                if self._wanted and len(self._waiting) >= self._wanted:
                    self._enough.set()
            if leads or self._wait(one):
                self._lead(one)
        except BaseException:
            self._leave(one)
            raise
        if one.error is not None:
            raise one.error
        if one.receipt is None:
            raise RuntimeError("an append ended without an outcome")
        return one.receipt

    def settle(self, one: Appending) -> None:
        """Wait until no leader has to do with an append that was interrupted."""
        while one.turn is not None and not one.ended and self._is_led(one):
            one.done.acquire(timeout=_POLL_S)

    def close(self) -> None:
        """Refuse appends from now on, wait for those that are under way, and end its thread."""
        with self._lock:
            self._closed = True
        while self._leading.locked() or self._waiting:
            with self._leading:  # whoever waits leads
                batch = self._store_waiting() if self._waiting else ()
            self._hand_on(batch)
        self._disk.shutdown()

    def _refusal(self) -> InvalidArgument:
        """Of an append to a ledger that is closed, or that another process has opened."""
        closed = "it is closed" if self._closed else "it was opened before this process was forked"
        return InvalidArgument(
            explain(
                "an append was refused: its ledger is not open here",
                on=f"{self._ledger.uri}, run {self._run_id!r}",
                found=closed,
                do="open the ledger, in the process that appends",
            )
        )

    def _wait(self, one: Appending) -> bool:
        """Wait for an outcome; True where there is none and this thread shall lead."""
        while not one.done.acquire(timeout=_POLL_S):
            if one.ended or not self._is_led(one):
                break
        return not one.ended

    def _is_led(self, one: Appending) -> bool:
        """Whether some thread leads that has the append, or will hand on to it."""
        with self._lock:
            return self._leading.locked() and one.turn in (None, self._turn)

    def _leave(self, one: Appending) -> None:
        """This thread was interrupted: nobody must wait for it."""
        with self._lock:
            promoted = not one.ended and not one.done.locked()
            if one in self._waiting:
                self._waiting.remove(one)
            elif one.turn is not None and one.error is None:
                one.uncertain = True  # some leader has it, or had it
        if promoted:
            self._hand_on([])

    def _lead(self, one: Appending) -> None:
        batch: Sequence[Appending] = ()
        try:
            # The lock is what makes a leader: it is let go of whatever interrupts this thread.
            with self._leading:
                if one in self._waiting:
                    self._gather()
                    batch = self._store_waiting()
                elif not one.ended:
                    one.uncertain = one.turn is not None
                    one.error = _unknown("the thread that stored it was interrupted")
        finally:
            self._hand_on(batch)

    def _store_waiting(self) -> Sequence[Appending]:
        """Store what waits; all of it has an outcome then. To be called by the leader."""
        with self._lock:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            self._turn += 1
            for one in batch:
                one.turn = self._turn
        self._last = len(batch)
        try:
            self._store(batch)
        except BaseException as error:
            for one in batch:
                if not one.ended:
                    one.error = _unknown(f"{type(error).__name__}: {error}")
            raise
        return batch

    def _gather(self) -> None:
        """Where appends come in crowds, let the crowd arrive; never a lone one wait."""
        wanted = self._last - self._last // 8
        if wanted < 4:
            return
        with self._lock:
            if len(self._waiting) >= wanted:
                return
            self._enough.clear()
            self._wanted = wanted
        self._enough.wait(_GATHER_S)
        self._wanted = 0

    def _hand_on(self, batch: Sequence[Appending]) -> None:
        with self._lock:
            successor = self._waiting[0] if self._waiting else None
            self._led = successor is not None
            if successor is not None:
                _wake(successor)
        for one in batch:
            _wake(one)

    def _store(self, batch: Sequence[Appending]) -> None:
        to_pack = [one for one in batch if one.pending is None]
        if to_pack:
            self._store_packed(to_pack)
        ready = [one for one in batch if one.error is None]
        pendings = [one.pending for one in ready if one.pending is not None]
        if not pendings:
            return
        for one in ready:
            one.uncertain = True
        try:
            outcomes = commit_all(self._ledger.catalog, self._run_id, pendings)
        except LedgerError as error:
            for one in ready:
                one.error = _copy(error)
            return
        self._ledger.exporter.notify(self._run_id)
        for one, outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, Receipt):
                one.receipt = outcome
            else:
                one.error = outcome
            one.uncertain = False  # last: its thread may be interrupted in between

    def _store_packed(self, appends: Sequence[Appending]) -> None:
        """Make the rows of small appends durable, and say what the catalog is asked for each."""
        packs, kept = pack(appends, self._ledger.lookup(self._run_id))
        files = [file for one in packs for file in one.files]
        if not files:
            return
        objects = [(path, b"".join(pieces)) for path, pieces in files]
        storing = self._disk.submit(self._ledger.store.put_hashed, objects)
        try:
            # Hashed while the disk is busy.
            for one in packs:
                hash_packed(one)
        finally:
            failed = storing.exception()
        try:
            if failed is not None:
                raise failed
        except LedgerError as error:
            for append in kept:
                append.error = _copy(error)


def _wake(one: Appending) -> None:
    with contextlib.suppress(RuntimeError):  # it is awake: it has looked by itself
        one.done.release()


def _copy(error: LedgerError) -> LedgerError:
    """Each thread raises an error of its own, so that none writes into another's traceback."""
    made = type(error)(*error.args)
    made.__cause__ = error.__cause__
    return made


def _unknown(found: str) -> StorageFailed:
    return StorageFailed(
        explain(
            "an append was given up: the thread that stored it was interrupted",
            found=found,
            do="repeat it: what was committed is not stored twice",
        )
    )
