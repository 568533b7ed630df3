"""What the catalog keeps of events themselves: branches, versions, consumption, numbers in use.

All of it follows from the stored events, so that a lost catalog can be made again from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ledger.catalog.records import Consumed, Forked, Published
from ledger.catalog.tables import RANGES

__all__ = ["COUNTERS", "Derived", "derive", "ranges_of"]

COUNTERS = {
    "index": ("index", "indices"),
    "group_index": ("group_index",),
    "rollout_id": ("rollout_id", "rollout_ids"),
    "weight_version": ("weight_version",),
}
"""Name of a counter → columns that use its numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """What one append adds to the derived tables. Offsets count its events from 0."""

    forked: tuple[Forked, ...]
    published: tuple[Published, ...]
    consumed: tuple[Consumed, ...]
    used: Mapping[str, int]


def derive(tables: Mapping[str, pa.Table]) -> Derived:
    """From the tables of one append, by kind, in the order in which they are numbered."""
    forked: list[Forked] = []
    published: list[Published] = []
    consumed: list[Consumed] = []
    used: dict[str, int] = {}
    offset = 0
    for kind, table in tables.items():
        if kind == "branch_forked":
            rows = _rows(table, "branch", "parent_branch", "fork_seq", "weight_version")
            for i, (branch, parent, fork_seq, version) in enumerate(rows):
                forked.append(Forked(branch, parent, fork_seq, version, offset + i))
        elif kind == "weights_published":
            rows = _rows(table, "weight_version", "parent_version", "step", "root")
            for i, (version, parent, step, root) in enumerate(rows):
                published.append(Published(version, parent, step, root, offset + i))
        elif kind == "step_committed":
            for i, (step, indices) in enumerate(_rows(table, "step", "indices")):
                consumed.append(Consumed(step, tuple(indices), offset + i))
        _add_used(used, table)
        offset += table.num_rows
    return Derived(tuple(forked), tuple(published), tuple(consumed), used)


def _rows(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _add_used(used: dict[str, int], table: pa.Table) -> None:
    for counter, columns in COUNTERS.items():
        for name in columns:
            if name not in table.column_names:
                continue
            values = table.column(name)
            if pa.types.is_list(values.type):
                values = pc.list_flatten(values)
            largest = pc.max(values).as_py()
            if largest is not None:
                used[counter] = max(largest, used.get(counter, largest))


def ranges_of(table: pa.Table) -> dict[str, tuple[int, int]]:
    """Column → its smallest and largest value, for those that are kept with a segment."""
    found = {}
    for name in RANGES:
        if name in table.column_names:
            ends = pc.min_max(table.column(name)).as_py()
            if ends["min"] is not None:
                found[name] = (ends["min"], ends["max"])
    return found
