"""What a benchmark gives: figures that are ratios, and the table that shows them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "Timing", "interleaved", "print_table"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians over the repetitions of one thing."""

    seconds: float
    cpu_seconds: float
    """Of all threads of this process."""
    all_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    group: str
    name: str
    against: str
    """What the ratio compares with."""
    ratio: float | None
    """More is better, except where `at_most`. None: not measured; the note says why."""
    goal: float | None = None
    at_most: bool = False
    """The goal is an upper limit."""
    unit: Literal["", "%", "s"] = ""
    """A ratio; a share of time; or seconds, where the goal is a time."""
    mb_per_s: float | None = None
    mb_per_cpu_s: float | None = None
    note: str = ""
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers behind the ratio, in units that their names say."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or nothing was measured."""
        if self.goal is None or self.ratio is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal

    def shown(self) -> str:
        """What was measured, as text."""
        if self.ratio is None:
            return "–"
        return _number(self.ratio, self.unit)

    def wanted(self) -> str:
        """The goal, as text; empty where there is none."""
        if self.goal is None:
            return ""
        return f"{'≤' if self.at_most else '≥'} {_number(self.goal, self.unit)}"


def interleaved(
    things: Mapping[str, Callable[[], Any]], repetitions: int, *, settle: Callable[[], Any] = int
) -> dict[str, Timing]:
    """Each thing timed `repetitions` times, in turns, after one turn that does not count.

    What slows the machine down for a while then slows all of them. `settle` runs, untimed, before
    each.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in things}
    for turn in range(repetitions + 1):
        for name, function in things.items():
            settle()
            cpu, began = time.process_time(), time.perf_counter()
            function()
            wall, used = time.perf_counter() - began, time.process_time() - cpu
            if turn:
                taken[name].append((wall, used))
    return {
        name: Timing(
            seconds=statistics.median(wall for wall, _ in pairs),
            cpu_seconds=statistics.median(cpu for _, cpu in pairs),
            all_seconds=tuple(wall for wall, _ in pairs),
        )
        for name, pairs in taken.items()
    }


def print_table(figures: Sequence[Figure], notes: Sequence[str], console: Console) -> None:
    """One table of all figures, then the notes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", min_width=26)
    table.add_column("compared with", min_width=20)
    for name in ("ratio", "goal", "MB/s", "MB/CPU-s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", min_width=30)
    group = ""
    for figure in figures:
        if figure.group != group:
            group = figure.group
            table.add_row(f"[bold]{group}[/bold]")
        table.add_row(
            f"  {figure.name}",
            figure.against,
            _coloured(figure),
            figure.wanted() + (" missed" if figure.met is False else ""),
            _speed(figure.mb_per_s),
            _speed(figure.mb_per_cpu_s),
            figure.note,
        )
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _coloured(figure: Figure) -> str:
    colour = {True: "green", False: "yellow", None: ""}[figure.met]
    return f"[{colour}]{figure.shown()}[/{colour}]" if colour else figure.shown()


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.2%}"
    return f"{value:.3g}{' ' + unit if unit else ''}"


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
