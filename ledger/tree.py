"""Draws the tree of weight versions, newest first, as `git log --graph` draws commits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from ledger.sql import run_query
from ledger.views import TableSource

__all__ = ["LogEntry", "draw_log", "read_log"]

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclasses.dataclass(frozen=True, slots=True)
class LogEntry:
    """One weight version and how it came into being."""

    weight_version: int
    parent_version: int | None
    branch: str
    step: int | None
    rollout_step: int | None
    reward_mean: float | None
    """Mean reward of the rollouts that trained it; each counts once."""
    checkpoint: str | None
    root: str
    """In hexadecimal."""
    head_of: str | None
    """The branch that it is the newest version of."""
    engines: int = 0
    """Engines that took it (weights_loaded), each once."""

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class _Glyphs:
    node: str
    line: str
    join: str
    cross: str
    end: str
    dash: str


_UNICODE = _Glyphs("●", "│", "├", "┴", "╯", "─")
_ASCII = _Glyphs("*", "|", "|", "/", "/", "-")


def read_log(reader: TableSource) -> list[LogEntry]:
    """All versions that `reader` sees, newest first. Raises what the reader raises."""
    rows = run_query(
        reader,
        "SELECT v.weight_version, v.parent_version, v.branch, v.step, v.rollout_step,\n"
        "       v.reward_mean, v.checkpoint, hex(v.root) AS root,\n"
        "       CASE WHEN v.weight_version = max(v.weight_version) OVER (PARTITION BY v.branch)\n"
        "            THEN v.branch END AS head_of,\n"
        "       coalesce(l.engines, 0) AS engines\n"
        "FROM versions AS v LEFT JOIN (\n"
        "  SELECT weight_version, count(DISTINCT coalesce(engine_address, engine)) AS engines\n"
        "  FROM weights_loaded GROUP BY weight_version\n"
        ") AS l ON v.weight_version = l.weight_version\n"
        "ORDER BY v.weight_version DESC",
    ).to_pylist()
    return [LogEntry(**{**row, "root": row["root"].lower()}) for row in rows]


def draw_log(entries: Sequence[LogEntry], *, ascii_only: bool = False) -> list[Text]:
    """Lines of the drawing: one a version, and one where a branch leaves its parent.

    A version stands above its parent, so that a branch begins at the line that joins it. `entries`
    are newest first. Colours are styles of the text: printed plainly they vanish.
    """
    glyphs = _ASCII if ascii_only else _UNICODE
    width = max((len(str(entry.weight_version)) for entry in entries), default=1)
    lanes: list[int | None] = []  # the version that each column waits for
    lines: list[Text] = []
    for entry in entries:
        version = entry.weight_version
        waiting = [place for place, expected in enumerate(lanes) if expected == version]
        if not waiting:
            lanes.append(version)
            waiting = [len(lanes) - 1]
        own = waiting[0]
        if len(waiting) > 1:
            lines.append(_join_line(lanes, waiting, glyphs))
            lanes = [e for place, e in enumerate(lanes) if place not in waiting[1:]]
        lines.append(_version_line(entry, len(lanes), own, width, glyphs))
        if entry.parent_version is None:
            del lanes[own]
        else:
            lanes[own] = entry.parent_version
    return lines


def _version_line(entry: LogEntry, lanes: int, own: int, width: int, glyphs: _Glyphs) -> Text:
    line = Text()
    for place in range(lanes):
        glyph = glyphs.node if place == own else glyphs.line
        line.append(glyph + " ", style=_COLOURS[place % len(_COLOURS)])
    line.append(f"{entry.weight_version:>{width}}", style="bold")
    line.append("  " + ("start" if entry.step is None else f"step {entry.step}"))
    if entry.reward_mean is not None:
        line.append(f"  reward {entry.reward_mean:.4f}")
    line.append(f"  {entry.root[:10]}", style="dim")
    if entry.checkpoint is not None:
        line.append("  checkpoint", style="green")
    if entry.engines:
        line.append(f"  {entry.engines} engine{'s' if entry.engines > 1 else ''}")
    if entry.head_of is not None:
        line.append(f"  ({entry.head_of})", style="bold " + _COLOURS[own % len(_COLOURS)])
    return line


def _join_line(lanes: Sequence[int | None], waiting: Sequence[int], glyphs: _Glyphs) -> Text:
    """The line on which the columns `waiting[1:]` end in the column `waiting[0]`."""
    first, last = waiting[0], waiting[-1]
    line = Text()
    for place in range(len(lanes)):
        style = _COLOURS[place % len(_COLOURS)]
        if place == first:
            line.append(glyphs.join, style=style)
        elif place == last:
            line.append(glyphs.end, style=style)
        elif place in waiting:
            line.append(glyphs.cross, style=style)
        elif first < place < last:
            line.append(glyphs.line if glyphs is _ASCII else "┼", style=style)
        else:
            line.append(glyphs.line, style=style)
        line.append(glyphs.dash if first <= place < last else " ", style=style)
    line.rstrip()
    return line
