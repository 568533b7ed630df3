"""A reward that a hardly trained model earns about half of the time."""

from __future__ import annotations

from typing import Any


def starts_early(sample: Any) -> float:
    """1.0 where the response begins with a letter of the first half of the alphabet."""
    return float(sample.response[:1] in set("abcdefghijklm"))
