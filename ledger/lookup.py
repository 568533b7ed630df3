"""What the checks of new events ask of the stored ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import select_in
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
    """The stored events of one run, on all its branches: a sample or version is unique in a run."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._ledger = ledger
        self._run_id = run_id

    def published(self, versions: Sequence[int]) -> set[int]:
        """Those of `versions` that have been published."""
        query = sa.select(t.versions.c.weight_version).where(t.versions.c.run_id == self._run_id)
        with self._ledger.catalog.read() as connection:
            rows = select_in(connection, query, t.versions.c.weight_version, versions)
        return {int(row.weight_version) for row in rows}

    def pieces(self, indices: np.ndarray) -> pa.Table:
        """All stored pieces (see PIECES) of the samples `indices`, an int64 array."""
        if not len(indices):
            return PIECES.empty_table()
        low, high = int(indices.min()), int(indices.max())
        found = [PIECES.empty_table()]
        for s in self._ledger.segment_infos(self._run_id):
            if s.kind not in PIECE_KINDS or s.file is None:
                continue
            least, largest = s.ranges["index"]
            if least <= high and largest >= low:
                with contextlib.suppress(NoLongerKept):
                    found.append(pieces_of(s.kind, upcast(self._ledger.index.open(s))))
        table = pa.concat_tables(found)
        return table.filter(pc.is_in(table.column("index"), pa.array(indices, pa.int64())))
