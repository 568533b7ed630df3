"""A queue before SQLite's writers' lock.

SQLite lets a writer that meets another one's transaction sleep and look again, each time longer:
with many processes some starve while the lock is free. Here they wait in the kernel for a lock on a
file beside the catalog, and are woken when it is free. The kernel takes it from a process that
dies. It only makes the waiting fair: whoever does not get his turn in time goes on, and SQLite's
own lock keeps transactions apart as ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Turns"]


class Turns:
    """The turns of this process's threads, among those of all processes of the host."""

    def __init__(self, path: Path, patience_s: float) -> None:
        """`path` is the file to lock: it is made, stays empty, and may be removed at any time."""
        self._path = path
        self._patience_s = patience_s
        self._own = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this thread's turn; it ends with the block."""
        own = self._own.acquire(timeout=self._patience_s)
        try:
            descriptor = None
            # Where no file can be made, SQLite will say so better.
            with contextlib.suppress(OSError):
                # Opened anew each time: a child that another thread forks meanwhile would hold the
                # lock of a file that is kept open for as long as it lives.
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            if descriptor is None:
                yield
            else:
                with _locked(descriptor, self._patience_s):
                    yield
        finally:
            if own:
                self._own.release()


@contextlib.contextmanager
def _locked(descriptor: int, patience_s: float) -> Iterator[None]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting = _Waiting(descriptor)
        if not waiting.got(patience_s):
            yield
            return
    try:
        yield
    finally:
        os.close(descriptor)


class _Waiting:
    """Waits for a lock in a thread of its own, as the kernel knows no limit of time for that."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        threading.Thread(target=self._wait, name="ledger-turn", daemon=True).start()

    def got(self, patience_s: float) -> bool:
        """Whether the lock came in time. If not, the descriptor is closed once it comes."""
        if self._done.wait(patience_s):
            return True
        with self._lock:
            self._given_up = not self._done.is_set()
            return not self._given_up

    def _wait(self) -> None:
        # An error is no reason to wait any longer: SQLite's own lock follows.
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._lock:
            if self._given_up:
                os.close(self._descriptor)
            else:
                self._done.set()
