"""What the catalog keeps of events themselves: branches, versions, consumption, tombstones.

All of it follows from the stored events, so that a lost catalog can be made again from them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledger.catalog.records import Consumed, Forked, Published, Retired
from ledger.catalog.tables import RANGES

__all__ = ["NOTHING_DERIVED", "Derived", "derive", "ranges_of", "sliced_ranges"]


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """What one append adds to the derived tables. Offsets count its events from 0."""

    forked: tuple[Forked, ...]
    published: tuple[Published, ...]
    consumed: tuple[Consumed, ...]
    retired: tuple[Retired, ...]


NOTHING_DERIVED = Derived((), (), (), ())


def derive(tables: Mapping[str, pa.Table]) -> Derived:
    """From the tables of one append, by kind, in the order in which they are numbered."""
    forked: list[Forked] = []
    published: list[Published] = []
    consumed: list[Consumed] = []
    retired: list[Retired] = []
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
        elif kind == "rows_retired":
            rows = _rows(table, "kind", "first_seqs", "row_counts")
            for i, (of, first_seqs, counts) in enumerate(rows):
                retired.append(Retired(of, tuple(first_seqs), tuple(counts), offset + i))
        offset += table.num_rows
    return Derived(tuple(forked), tuple(published), tuple(consumed), tuple(retired))


def _rows(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def ranges_of(table: pa.Table) -> dict[str, tuple[int, int]]:
    """Column → its smallest and largest value, for those that are kept with a segment."""
    found = {}
    for name in RANGES:
        if name in table.column_names:
            ends = pc.min_max(table.column(name)).as_py()
            if ends["min"] is not None:
                found[name] = (ends["min"], ends["max"])
    return found


def sliced_ranges(batch: pa.RecordBatch, bounds: Sequence[int]) -> list[dict[str, tuple[int, int]]]:
    """For each slice of rows, bounds[i] to bounds[i + 1], none empty, what `ranges_of` gives."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in bounds[1:]]
    names = batch.schema.names
    for name in RANGES:
        if name not in names:
            continue
        array = batch.column(name)
        if array.null_count:
            for i, (low, high) in enumerate(itertools.pairwise(bounds)):
                ends = pc.min_max(array.slice(low, high - low)).as_py()
                if ends["min"] is not None:
                    found[i][name] = (ends["min"], ends["max"])
            continue
        values = array.to_numpy()
        least = np.minimum.reduceat(values, bounds[:-1]).tolist()
        largest = np.maximum.reduceat(values, bounds[:-1]).tolist()
        for i, ends in enumerate(zip(least, largest, strict=True)):
            found[i][name] = ends
    return found
