"""A reward that a model with random weights earns about half of the time."""

from __future__ import annotations

from typing import Any

__all__ = ["even"]


def even(sample: Any) -> float:
    """1.0 where the first sampled id is even."""
    return float(int(sample.tokens[-sample.response_length]) % 2 == 0)
