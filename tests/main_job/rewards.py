"""A reward that a hardly trained model earns about half of the time."""

from __future__ import annotations

from typing import Any

from rollout.rewards import Reward


def starts_early(sample: Any) -> float:
    """1.0 where the response begins with a letter of the first half of the alphabet."""
    return float(sample.response[:1] in set("abcdefghijklm"))


def with_parts(sample: Any) -> Reward:
    """As `starts_early`, and a part for responses of more than three tokens."""
    early, long = starts_early(sample), float(sample.response_length > 3)
    return Reward(value=early + long, parts={"early": early, "long": long})
