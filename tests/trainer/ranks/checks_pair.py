"""Checks that go wrong. They need no world, so that a pair for them starts in no time."""

from __future__ import annotations

import sys
import threading


def fail_on(rank: str) -> None:
    """Raise on one rank; the other hangs, as it would in a collective."""
    if sys.argv[1] == rank:
        raise ValueError("the reason")
    hang()


def hang() -> None:
    """Never come back."""
    threading.Event().wait()
