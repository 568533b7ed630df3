"""Which numbers an option takes, as data: declared beside the option, checked before anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LARGEST", "LARGEST_FLOAT", "Range", "above", "at_least"]

LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of a number: what float32 holds, in which the trainer computes."""

LARGEST = 2**31 - 1
"""Of a count: what the columns that record it hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An interval; `str()` of it says it in words."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    """Whether `low` itself is outside."""
    without_high: bool = False
    off: int | None = None
    """A value outside that is taken too and switches the option off."""

    def __contains__(self, value: float) -> bool:
        """Whether `value` is taken; NaN, infinities and what is none but in float64 never are."""
        if value == self.off:
            return True
        over = self.low < value if self.without_low else self.low <= value
        under = value < self.high if self.without_high else value <= self.high
        return over and under and (isinstance(value, int) or abs(value) <= LARGEST_FLOAT)

    def __str__(self) -> str:
        sides = []
        if self.low != -math.inf:
            sides.append(("above " if self.without_low else "at least ") + str(self.low))
        if self.high != math.inf:
            sides.append(("below " if self.without_high else "at most ") + str(self.high))
        text = " and ".join(sides) or "a finite number"
        return text if self.off is None else f"{text}, or {self.off} (off)"


def at_least(low: float, high: float = math.inf, *, off: int | None = None) -> Range:
    """[low, high]"""
    return Range(low=low, high=high, off=off)


def above(low: float, high: float = math.inf) -> Range:
    """(low, high]"""
    return Range(low=low, high=high, without_low=True)
