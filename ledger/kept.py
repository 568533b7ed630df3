"""Things in memory that are worth keeping, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

__all__ = ["KEEP_BYTES", "Kept"]

KEEP_BYTES = 512 << 20
"""Bytes that are kept where nothing else is said."""

_KEEP_ITEMS = 8192
"""Files stay open with what was read from them, and the kernel limits how many can be mapped."""


class Kept:
    """By key, up to a number of bytes; the longest unused leaves first. Threads may share it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.size_bytes = 0
        self._items: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Any:
        """What is kept under a key, or None."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Any, size_bytes: int) -> None:
        """Keep something that takes so many bytes of memory of its own."""
        with self._lock:
            _, before = self._items.pop(key, (None, 0))
            self._items[key] = (value, size_bytes)
            self.size_bytes += size_bytes - before
            # The newest one stays, however large it is: it is in use.
            while len(self._items) > 1 and (
                self.size_bytes > self._limit_bytes or len(self._items) > _KEEP_ITEMS
            ):
                _, (_, gone) = self._items.popitem(last=False)
                self.size_bytes -= gone

    def clear(self) -> None:
        """Keep nothing of what is kept now."""
        with self._lock:
            self._items.clear()
            self.size_bytes = 0
