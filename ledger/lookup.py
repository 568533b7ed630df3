"""What the checks of new events ask of the stored ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import select_in
from ledger.catalog.records import SegmentInfo
from ledger.errors import NoLongerKept
from ledger.schema import upcast

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["PIECES", "PIECE_KINDS", "LedgerLookup", "pieces_of"]

PIECES = pa.schema(
    [("index", pa.int64()), ("start", pa.int64()), ("length", pa.int64()), ("sampled", pa.bool_())]
)
"""A piece of a response: tokens start to start + length, sampled by the engine or not."""


PIECE_KINDS = ("segment_generated", "observation_appended")
"""The events that a response is made of."""


def pieces_of(kind: str, table: pa.Table) -> pa.Table:
    """The pieces that a table of segment_generated or observation_appended stands for."""
    return pa.Table.from_arrays(
        [
            table.column("index"),
            table.column("start").cast(pa.int64()),
            pc.list_value_length(table.column("tokens")).cast(pa.int64()),
            pa.array(np.full(table.num_rows, kind == "segment_generated")),
        ],
        schema=PIECES,
    )


class LedgerLookup:
    """The stored events of one run, on all its branches: a sample or version is unique in a run.

    It remembers what it has seen, so that asking again costs what is new. Threads may share it.
    """

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._published: set[int] = set()
        self._seen = 0
        """Segments of the run that have been looked at."""
        self._with_pieces: list[SegmentInfo] = []
        self._ends = np.empty((2, 64), np.int64)
        """[2, room] smallest and largest sample index of each of them."""
        self._lock = threading.Lock()

    def published(self, versions: Sequence[int]) -> set[int]:
        """Those of `versions` that have been published."""
        asked = set(versions)
        left = asked - self._published
        if left:
            query = sa.select(t.versions.c.weight_version).where(
                t.versions.c.run_id == self._run_id
            )
            with self._ledger.catalog.read() as connection:
                rows = select_in(connection, query, t.versions.c.weight_version, sorted(left))
            # Never taken back, so never forgotten.
            self._published.update(int(row.weight_version) for row in rows)
        return asked & self._published

    def pieces(self, indices: np.ndarray) -> pa.Table:
        """All stored pieces (see PIECES) of the samples `indices`, an int64 array."""
        if not len(indices):
            return PIECES.empty_table()
        found = [PIECES.empty_table()]
        for s in self._overlapping(int(indices.min()), int(indices.max())):
            with contextlib.suppress(NoLongerKept):
                found.append(pieces_of(s.kind, upcast(self._ledger.index.open(s))))
        table = pa.concat_tables(found)
        return table.filter(pc.is_in(table.column("index"), pa.array(indices, pa.int64())))

    def _overlapping(self, low: int, high: int) -> list[SegmentInfo]:
        """The segments with pieces of samples from `low` to `high`, maybe."""
        with self._lock:
            new = self._ledger.index.infos_from(self._run_id, self._seen)
            self._seen += len(new)
            for s in new:
                if s.kind in PIECE_KINDS:
                    number = len(self._with_pieces)
                    if number == self._ends.shape[1]:
                        self._ends = np.concatenate([self._ends, np.empty_like(self._ends)], axis=1)
                    self._ends[:, number] = s.ranges["index"]
                    self._with_pieces.append(s)
            least, largest = self._ends[:, : len(self._with_pieces)]
            hits = np.flatnonzero((least <= high) & (largest >= low))
            return [self._with_pieces[number] for number in hits]
