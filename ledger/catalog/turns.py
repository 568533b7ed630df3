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
import io
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

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this thread's turn; it ends with the block."""
        file = None
        # Where no file can be made, SQLite will say so better.
        with contextlib.suppress(OSError):
            # Opened anew each time: a child that another thread forks meanwhile would hold the
            # lock of a file that is kept open for as long as it lives. An object, not a number: it
            # is closed, and the turn over, also where this thread is interrupted right here.
            file = io.FileIO(self._path, "a")
        if file is None:
            yield
            return
        with file:
            _lock(file, self._patience_s)
            yield


def _lock(file: io.FileIO, patience_s: float) -> None:
    """Lock the file, or leave it after a while."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # The kernel knows no limit of time: a thread of its own waits, with a number of its own
        # for the same lock, which it closes. What it holds is held until `file` is closed too.
        done = threading.Event()
        waiting = threading.Thread(
            target=_wait, args=(os.dup(file.fileno()), done), name="ledger-turn", daemon=True
        )
        waiting.start()
        done.wait(patience_s)


def _wait(descriptor: int, done: threading.Event) -> None:
    # An error is no reason to wait any longer: SQLite's own lock follows.
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)
        done.set()
