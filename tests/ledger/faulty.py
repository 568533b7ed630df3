"""A store that fails, or blocks, when it is told to, and what tests of queues share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ledger import Ledger
from ledger.errors import LedgerError, StorageFailed, explain
from ledger.queue import QueuedWriter
from ledger.storage import Staged


class FaultyStore:
    """Everything but naming bytes goes straight through."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.failures = 0
        """How many of the next calls fail; −1: all."""
        self.calls = 0
        self.gate = threading.Event()
        """While it is not set, calls block."""
        self.gate.set()
        self.blocked = threading.Event()
        """Set when a call has met the closed gate."""

    def publish(self, objects: Sequence[tuple[str, Staged]]) -> None:
        self._call()
        self.inner.publish(objects)

    def put_hashed(self, objects: Sequence[tuple[str, Any]]) -> None:
        self._call()
        self.inner.put_hashed(objects)

    def _call(self) -> None:
        self.calls += 1
        if not self.gate.is_set():
            self.blocked.set()
            self.gate.wait(60)
        if self.failures:
            self.failures -= 1
            raise StorageFailed(explain("an object was not stored", on="a faulty store"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def store_of(ledger: Ledger) -> FaultyStore:
    assert isinstance(ledger.store, FaultyStore)
    return ledger.store


def scores(ledger: Ledger) -> list[int]:
    found: list[int] = ledger.reader("r").table("sample_scored")["index"].to_pylist()
    return found


def gaps(ledger: Ledger) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ledger.reader("r").table("gap_recorded").to_pylist()
    return found


def until(met: Any, timeout_s: float = 20.0) -> None:
    """Wait until `met()`."""
    end = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.002)


@contextlib.contextmanager
def closing(queue: QueuedWriter) -> Iterator[QueuedWriter]:
    """Close without complaint what a test left in trouble on purpose."""
    try:
        yield queue
    finally:
        with contextlib.suppress(LedgerError):
            queue.close(0.0)
