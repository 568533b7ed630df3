"""Sums of one-digit numbers behind two examples: a base model needs no chat template for them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from ledger.errors import InvalidArgument, explain
from ledger.seeds import derive_seed
from rollout.tasks import Prompt

__all__ = ["AdditionSource"]


class AdditionSource:
    """`3+4=7`, `5+2=7`, then `X+Y=`: the answer is the number, then a newline.

    Options: `shots` (how many of the two examples, default 2), `largest` (of an addend, default 9).
    """

    stop_texts: tuple[str, ...] = ("\n",)
    reward = "exact_line"

    def __init__(self, *, seed: int, options: Mapping[str, Any] | None = None) -> None:
        """Raises InvalidArgument where an option is unknown or out of range."""
        given = {"shots": 2, "largest": 9} | dict(options or {})
        ranges = {"shots": range(3), "largest": range(1, 1_000_000)}
        for option, value in given.items():
            if option not in ranges or not isinstance(value, int) or value not in ranges[option]:
                raise InvalidArgument(
                    explain(
                        "making the task 'addition'",
                        on=option,
                        expected="shots in 0..2 and largest from 1",
                        found=value,
                    )
                )
        self._seed, self._largest = seed, given["largest"]
        self._examples = "".join(("3+4=7\n", "5+2=7\n")[: given["shots"]])
        self.name = f"addition(largest={self._largest},shots={given['shots']},seed={seed})"

    def prompt(self, row: int) -> Prompt:
        """The sum of `row`."""
        random = Random(derive_seed("addition", self._seed, row))
        x, y = random.randint(1, self._largest), random.randint(1, self._largest)
        return Prompt(text=f"{self._examples}{x}+{y}=", label=str(x + y))
