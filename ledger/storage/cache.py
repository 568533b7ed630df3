"""Whole objects kept in memory, up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import pyarrow as pa

from ledger.errors import InvalidArgument, explain

__all__ = ["CACHE_BYTES", "BufferCache", "cache_bytes"]

CACHE_BYTES = 256 << 20
"""How much is kept where nothing else is said."""
_VARIABLE = "LEDGER_CACHE_BYTES"


def cache_bytes() -> int:
    """What the environment says in LEDGER_CACHE_BYTES, or CACHE_BYTES. Raises: InvalidArgument."""
    given = os.environ.get(_VARIABLE)
    if given is None:
        return CACHE_BYTES
    if given.isdecimal():
        return int(given)
    raise InvalidArgument(
        explain(
            "a setting cannot be read",
            on=_VARIABLE,
            expected="a number of bytes; 0 keeps nothing",
            found=repr(given),
        )
    )


class BufferCache:
    """The objects that were read last. Threads may share it.

    It holds at most `limit_bytes`; an object that is larger is not kept. What a caller still holds
    lives on when the cache lets go of it, and counts no longer.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[str, pa.Buffer]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """How much it holds now."""
        return self._bytes

    def get(self, path: str) -> pa.Buffer | None:
        """The object as it was kept, and moves it to the end of those that must go."""
        with self._lock:
            if path not in self._kept:
                return None
            self._kept.move_to_end(path)
            return self._kept[path][1]

    def keep(self, path: str, identity: str, data: pa.Buffer) -> None:
        """Keep an object that is `identity` in its store; the oldest ones go."""
        with self._lock:
            self._drop(path)
            if data.size > self.limit_bytes:
                return
            self._kept[path] = (identity, data)
            self._bytes += data.size
            while self._bytes > self.limit_bytes:
                self._drop(next(iter(self._kept)))

    def forget(self, path: str, *, unless: str | None = None) -> None:
        """Let go of an object; with `unless`, only when it is another than that identity."""
        with self._lock:
            if path in self._kept and (unless is None or self._kept[path][0] != unless):
                self._drop(path)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _drop(self, path: str) -> None:
        gone = self._kept.pop(path, None)
        if gone is not None:
            self._bytes -= gone[1].size
