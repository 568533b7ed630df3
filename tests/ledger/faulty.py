"""A store that fails, or blocks, when it is told to; otherwise the one that it wraps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ledger.errors import StorageFailed, explain
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
        self.calls += 1
        if not self.gate.is_set():
            self.blocked.set()
            self.gate.wait(60)
        if self.failures:
            self.failures -= 1
            raise StorageFailed(explain("an object was not stored", on="a faulty store"))
        self.inner.publish(objects)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
