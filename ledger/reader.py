"""Reading one state of a branch: tables on the memory of the files, and SQL over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledger.catalog.records import SegmentInfo
from ledger.catalog.tables import RANGES
from ledger.errors import Corrupt, InvalidArgument, explain
from ledger.scan import PLACE_TYPES
from ledger.schema import arrow_schema, event_class, upcast

if TYPE_CHECKING:
    import duckdb

    from ledger.session import SessionPool
    from ledger.store import Ledger

__all__ = ["Reader"]


class Reader:
    """The events that a branch saw at one moment. What is appended later does not show."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str | None,
        lineage: Mapping[str, int | None],
        head_seq: int,
        *,
        verify: bool,
    ) -> None:
        self.run_id = run_id
        self.branch = branch
        """None: all branches."""
        self.head_seq = head_seq
        """The state: only events with seq at or below this are seen."""
        self._ledger = ledger
        self._lineage = dict(lineage)
        self._limits = {
            name: head_seq if limit is None else min(limit, head_seq)
            for name, limit in lineage.items()
        }
        self._verify = verify
        self._tables: dict[str, pa.Table] = {}

    def segments(self, kind: str | None = None) -> list[SegmentInfo]:
        """The segments that this state sees, in order; a fork may cut the last of an ancestor."""
        return [
            s
            for s in self._ledger.segment_infos(self.run_id, self.head_seq)
            if (kind is None or s.kind == kind) and s.first_seq <= self._limits.get(s.branch, 0)
        ]

    def kinds(self) -> list[str]:
        """Kinds that have events in this state, sorted."""
        return sorted({s.kind for s in self.segments()})

    def table(
        self,
        kind: str,
        columns: Sequence[str] | None = None,
        *,
        where: Mapping[str, tuple[int, int]] | None = None,
    ) -> pa.Table:
        """All events of a kind, in order, with the columns run_id, branch and seq (int64) added.

        The rows lie in the files' own memory; they are read-only. `where` names ranges, both ends
        included, of rollout_step, step, group_index or index: segments that lie outside are left
        out. Rows outside may remain, so filter the rows as well.

        Raises:
            Corrupt: a file is missing or is not what was committed.
            IncompatibleFormat: a newer version wrote a segment.
            InvalidArgument: `where` or `columns` names something that is not there.
        """
        unknown = [name for name in where or {} if name not in RANGES]
        if unknown:
            raise InvalidArgument(
                explain("a range was not understood", expected=f"of {RANGES}", found=unknown)
            )
        names = _names(kind)
        unknown = [name for name in columns or () if name not in names]
        if unknown:
            raise InvalidArgument(
                explain("a column was not found", on=kind, expected=names, found=unknown)
            )
        if columns is not None and all(name in PLACE_TYPES for name in columns):
            # The catalog knows the place: no file is opened.
            chosen = self._chosen(kind, where)
            return self._place(chosen).select(list(columns))
        whole = self._tables.get(kind)
        if whole is None:
            whole = self._assemble(kind, where)
            if where is None:
                self._tables[kind] = whole
        return whole if columns is None else whole.select(list(columns))

    @property
    def sessions(self) -> SessionPool:
        """Connections that the readers of this ledger share; see `ledger.session`."""
        return self._ledger.sessions

    def sql(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """The result of one SQL query (DuckDB's dialect) over the views of this state.

        Raises:
            InvalidArgument: the query is wrong, or does not only read.
        """
        from ledger.sql import run_query

        return run_query(self, query, params)

    def connect(self) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with all views of this state; it reaches nothing else on the machine.

        The caller closes it.
        """
        from ledger.sql import connect

        return connect(self)

    def _chosen(self, kind: str, where: Mapping[str, tuple[int, int]] | None) -> list[SegmentInfo]:
        chosen = self.segments(kind)
        return chosen if where is None else [s for s in chosen if _overlaps(s, where)]

    def _assemble(self, kind: str, where: Mapping[str, tuple[int, int]] | None) -> pa.Table:
        """The rows of a kind. What an earlier reader of the lineage put together is built upon."""
        event_class(kind)
        chosen = self._chosen(kind, where)
        if where is not None:
            return self._join(kind, chosen)
        key = (self.run_id, kind, tuple(self._lineage.items()), self._verify)
        done, before = self._ledger.assembled.get(key, (0, None))
        if before is None or done > self.head_seq:
            done, before = 0, None
        table = self._join(kind, [s for s in chosen if s.first_seq > done])
        if before is not None:
            table = pa.concat_tables([before, table])
        # A table in which this state cuts a segment short cannot be built upon.
        if all(s.last_seq <= self.head_seq for s in chosen[-1:]):
            self._ledger.assembled[key] = (self.head_seq, table)
        return table

    def _join(self, kind: str, chosen: list[SegmentInfo]) -> pa.Table:
        """The rows of these segments, with their place."""
        schema = arrow_schema(kind)
        # run_started and branch_forked name their own run and branch: the same values.
        names = [name for name in schema.names if name not in PLACE_TYPES]
        parts = [
            upcast(self._open(s)).select(names).slice(0, rows)
            for s, rows in zip(chosen, self._rows(chosen), strict=True)
        ]
        own = pa.schema([schema.field(name) for name in names], metadata=schema.metadata)
        table = pa.concat_tables(parts) if parts else own.empty_table()
        place = self._place(chosen)
        for name in PLACE_TYPES:
            table = table.append_column(place.field(name), place.column(name))
        return table

    def _rows(self, chosen: list[SegmentInfo]) -> list[int]:
        """How many rows of each segment this state sees."""
        return [min(s.rows, self._limits[s.branch] - s.first_seq + 1) for s in chosen]

    def _place(self, chosen: list[SegmentInfo]) -> pa.Table:
        """run_id, branch and seq of the rows of these segments."""
        codes = {name: code for code, name in enumerate(self._limits)}
        rows = np.array(self._rows(chosen), np.int64)
        firsts = np.array([s.first_seq for s in chosen], np.int64)
        branches = np.array([codes[s.branch] for s in chosen], np.int32)
        ends = np.cumsum(rows)
        total = int(ends[-1]) if len(rows) else 0
        seqs = np.arange(total, dtype=np.int64) + np.repeat(firsts - (ends - rows), rows)
        columns = [
            pa.DictionaryArray.from_arrays(np.zeros(total, np.int32), pa.array([self.run_id])),
            pa.DictionaryArray.from_arrays(
                np.repeat(branches, rows), pa.array(list(self._limits), pa.string())
            ),
            pa.array(seqs),
        ]
        fields = [pa.field(name, type_, nullable=False) for name, type_ in PLACE_TYPES.items()]
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def _open(self, segment: SegmentInfo) -> pa.Table:
        if segment.file is None:
            raise Corrupt(
                explain(
                    "the rows of a segment are no longer kept",
                    on=f"run {segment.run_id!r}, {segment.kind}, seq {segment.first_seq}",
                )
            )
        return self._ledger.segments.open(
            segment.file, segment.kind, segment.layout, verify=self._verify
        )


def _names(kind: str) -> list[str]:
    """Columns of a reader's table: the event's own, then its place, each once."""
    own = [name for name in arrow_schema(kind).names if name not in PLACE_TYPES]
    return [*own, *PLACE_TYPES]


def _overlaps(segment: SegmentInfo, where: Mapping[str, tuple[int, int]]) -> bool:
    for name, (low, high) in where.items():
        ends = segment.ranges.get(name)
        if ends is not None and (ends[1] < low or ends[0] > high):
            return False
    return True
