"""Which of several engines serves a session: consistent hashing.

Karger et al., "Consistent Hashing and Random Trees", STOC 1997: engines and sessions are points on
a circle, and a session belongs to the next engine clockwise. An engine that goes away hands its own
sessions to its neighbours; nobody else's move, so that their prefix caches stay of use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from hashlib import blake2b

__all__ = ["HashRing"]

_POINTS = 128
"""Points of an engine: shares of the circle differ by about 1/sqrt(128) = 9%."""


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class HashRing:
    """Engines numbered from 0. The same in every process."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the engines' own, each another, and stay theirs."""
        points = sorted(
            (_place(f"{name}#{point}"), number)
            for number, name in enumerate(names)
            for point in range(_POINTS)
        )
        self._places = [place for place, _ in points]
        self._owners = [number for _, number in points]

    def owner(self, key: str, serving: Collection[int]) -> int | None:
        """The number of the engine for `key` among those that serve; None where none does."""
        start = bisect_right(self._places, _place(key))
        for step in range(len(self._owners) if serving else 0):
            number = self._owners[(start + step) % len(self._owners)]
            if number in serving:
                return number
        return None
