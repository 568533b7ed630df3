"""How an option is declared: once, with its group, type, default and nature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.ranges import LARGEST, Range, at_least

__all__ = ["ANY", "COUNT", "Group", "Option", "place"]

Group = Literal[
    "ledger",
    "checkpoint",
    "rollout",
    "engines",
    "engine weights",
    "agents",
    "data",
    "algorithm",
    "batch",
    "routing",
    "parallelism",
    "optimizer",
    "megatron",
    "tracking",
]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line."""

    name: str
    """With underscores; the flag has dashes."""
    group: Group
    type: Any
    """int, float, str; bool for a switch; 'json' for a JSON object; 'ints', 'floats', 'strs' for a
    list, and with '+' in place of the 's' for a list or one value."""
    default: Any
    help: str
    content: bool = True
    choices: tuple[str, ...] | None = None
    within: Range | None = None
    """Numbers that it takes; None: a text, a switch, or a JSON object."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


COUNT = at_least(1, LARGEST)
ANY = Range()


def place(
    name: str, group: Group, type_: Any, default: Any, text: str, within: Range | None = None
) -> Option:
    """An option that says where, how long or how often."""
    return Option(name, group, type_, default, text, content=False, within=within)
