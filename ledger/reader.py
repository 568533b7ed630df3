"""Reading one state of a branch: tables on the memory of the files, and SQL over them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledger.catalog.records import SegmentInfo
from ledger.catalog.tables import RANGES
from ledger.encode import events_of
from ledger.errors import Corrupt, InvalidArgument, NoLongerKept, explain
from ledger.events import RowsRetired
from ledger.scan import PLACE_TYPES
from ledger.schema import arrow_schema, event_class, upcast
from ledger.sealed import SEALED_FORMAT

if TYPE_CHECKING:
    import duckdb

    from ledger.session import SessionPool
    from ledger.store import Ledger

__all__ = ["Reader"]

_AT_ONCE = 8
"""Segments that are fetched at the same time."""


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
        self._tables: dict[tuple[str, tuple[str, ...] | None], pa.Table] = {}

    def segments(self, kind: str | None = None) -> list[SegmentInfo]:
        """The segments that this state sees, in order; a fork may cut the last of an ancestor."""
        return self._seen_after(kind, 0)

    def _seen_after(self, kind: str | None, after: int) -> list[SegmentInfo]:
        infos = self._ledger.segment_infos(self.run_id, self.head_seq)
        first = bisect.bisect_right(infos, after, key=lambda s: s.first_seq) if after else 0
        return [
            s
            for s in itertools.islice(infos, first, None)
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
        out. Rows outside may remain, so filter the rows as well. Rows that retention has retired
        are left out: `retired` counts them, `require_kept` refuses to go on without them.

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
        read = self._decoded(kind, columns)
        whole = self._tables.get((kind, None))
        if whole is None:
            whole = self._tables.get((kind, read))
        if whole is None:
            whole = self._assemble(kind, where, read)
            if where is None:
                self._tables[kind, read] = whole
        return whole if columns is None else whole.select(list(columns))

    def retired(self) -> dict[str, int]:
        """Kind → rows of this state that a rule of retention has retired; empty where none."""
        rows: dict[str, int] = {}
        for s in self.segments():
            if s.file is None:
                rows[s.kind] = rows.get(s.kind, 0) + self._seen(s)
        return rows

    def require_kept(self, kind: str, column: str, values: Iterable[int]) -> None:
        """Raise NoLongerKept where rows of these values may be among the retired ones.

        `column` is one of rollout_step, step, group_index, index. To be asked where rows that are
        needed are missing: whether they were ever there cannot be told from the rows themselves.
        """
        wanted = list(values)
        for s in self.segments(kind):
            low, high = s.ranges.get(column, (0, -1))
            if s.file is None and any(low <= value <= high for value in wanted):
                self._ledger.index.open(s)

    def retired_hashes(self) -> dict[str, list[bytes]]:
        """Kind → content hashes of the retired rows of this state, as their events recorded them.

        Raises: Corrupt where an event does not say them.
        """
        gone = {s.first_seq: s for s in self.segments() if s.file is None}
        hashes: dict[str, list[bytes]] = {}
        if not gone:
            return hashes
        # On whatever branch: a fork sees rows that its parent retired later.
        everywhere = self._ledger.reader(self.run_id, None, verify=self._verify)
        for event in events_of(everywhere.table(RowsRetired.KIND), RowsRetired):
            ends = np.cumsum(event.row_counts).tolist()
            for first_seq, count, end in zip(
                event.first_seqs.tolist(), event.row_counts.tolist(), ends, strict=True
            ):
                s = gone.pop(first_seq, None)
                if s is not None:
                    of_segment = event.row_hashes[end - count : end]
                    hashes.setdefault(event.kind, []).extend(of_segment[: self._seen(s)])
        if gone:
            raise Corrupt(
                explain(
                    "the hashes of retired rows were not found",
                    on=f"run {self.run_id!r}",
                    expected="an event rows_retired for each segment that is no longer kept",
                    found=f"none for those at seq {sorted(gone)[:10]}",
                    do="see what is wrong: ledger verify",
                )
            )
        return hashes

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

    def _chosen(
        self, kind: str, where: Mapping[str, tuple[int, int]] | None, *, after: int = 0
    ) -> list[SegmentInfo]:
        """The segments that begin after `after` and are still kept, as far as is known."""
        chosen = [s for s in self._seen_after(kind, after) if s.file is not None]
        return chosen if where is None else [s for s in chosen if _overlaps(s, where)]

    def _decoded(self, kind: str, columns: Sequence[str] | None) -> tuple[str, ...] | None:
        """The columns to read, sorted; None: all, which costs nothing where no file is sealed."""
        if columns is None or not any(
            s.file and s.file.format == SEALED_FORMAT for s in self.segments(kind)
        ):
            return None
        return tuple(sorted(set(columns)))

    def _assemble(
        self,
        kind: str,
        where: Mapping[str, tuple[int, int]] | None,
        read: tuple[str, ...] | None,
    ) -> pa.Table:
        """The rows of a kind. What an earlier reader of the lineage put together is built upon."""
        if where is not None:
            return self._join(kind, self._chosen(kind, where), read)
        key = (self.run_id, kind, tuple(self._lineage.items()), self._verify, read)
        done, before, mapped = self._ledger.assembled.get(key) or (0, None, True)
        if before is None or done > self.head_seq:
            done, before, mapped = 0, None, True
        chosen = self._chosen(kind, where, after=done)
        if before is not None and not chosen:
            table = before
        else:
            table = self._join(kind, chosen, read)
            if before is not None:
                table = pa.concat_tables([before, table])
        # A table in which this state cuts a segment short cannot be built upon.
        if all(s.last_seq <= self.head_seq for s in chosen[-1:]):
            # What is mapped takes no memory; what was decoded or fetched does.
            mapped = mapped and self._ledger.store.root is not None
            mapped = mapped and not any(
                s.file is not None and s.file.format == SEALED_FORMAT for s in chosen
            )
            size_bytes = 0 if mapped else table.nbytes
            self._ledger.assembled.put(key, (self.head_seq, table, mapped), size_bytes)
        return table

    def _join(self, kind: str, chosen: list[SegmentInfo], read: tuple[str, ...] | None) -> pa.Table:
        """The rows of these segments, with their place."""
        schema = arrow_schema(kind)
        # run_started and branch_forked name their own run and branch: the same values.
        names = [name for name in schema.names if name not in PLACE_TYPES]
        if read is not None:
            names = [name for name in names if name in read]
        parts: list[pa.Table] = []
        opened: list[SegmentInfo] = []
        asked = None if read is None else names
        runs = list(self._runs(chosen))
        whole = self._open_all([_as_one(run) for run in runs], asked)
        for run, found in zip(runs, whole, strict=True):
            together = found is not None and found.num_rows == sum(s.rows for s in run)
            # Some were moved or retired since they were looked up: each on its own.
            tables = [found] if together else self._open_all(run, asked)
            members = [run] if together else [[s] for s in run]
            for several, table in zip(members, tables, strict=True):
                if table is not None:
                    parts.append(table.slice(0, sum(self._rows(several))))
                    opened += several
        chosen = opened
        own = pa.schema([schema.field(name) for name in names], metadata=schema.metadata)
        # Selected once, not in each part: that would cost more than reading a small one.
        table = pa.concat_tables(parts).select(names) if parts else own.empty_table()
        table = table.replace_schema_metadata(own.metadata)
        place = self._place(chosen)
        for name in PLACE_TYPES:
            table = table.append_column(place.field(name), place.column(name))
        return table

    def _runs(self, chosen: list[SegmentInfo]) -> Iterator[list[SegmentInfo]]:
        """Neighbours that lie one after the other in one file, as far as this state sees them."""
        run: list[SegmentInfo] = []
        for s in chosen:
            if run and (self._seen(run[-1]) < run[-1].rows or not _follows(run[-1], s)):
                yield run
                run = []
            run.append(s)
        if run:
            yield run

    def _rows(self, chosen: list[SegmentInfo]) -> list[int]:
        """How many rows of each segment this state sees."""
        return [self._seen(s) for s in chosen]

    def _seen(self, segment: SegmentInfo) -> int:
        return min(segment.rows, self._limits[segment.branch] - segment.first_seq + 1)

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

    def _open_all(
        self, chosen: list[SegmentInfo], names: list[str] | None
    ) -> list[pa.Table | None]:
        """What `_open` gives for each; None where the rows are no longer kept."""

        def opened(segment: SegmentInfo) -> pa.Table | None:
            try:
                return self._open(segment, names)
            except NoLongerKept:
                return None

        if self._ledger.store.root is not None or len(chosen) < 2:
            return [opened(s) for s in chosen]
        # From elsewhere each takes a request or two, which is waiting for the most part.
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ledger-reader") as pool:
            return list(pool.map(opened, chosen))

    def _open(self, segment: SegmentInfo, names: list[str] | None) -> pa.Table:
        """The columns `names` (None: all) in the present layout."""
        index, verify = self._ledger.index, self._verify
        if names is None:
            return upcast(index.open(segment, verify=verify))
        if segment.layout == event_class(segment.kind).LAYOUT:
            return index.open(segment, verify=verify, columns=names)
        # An upcaster may need any column of the layout.
        return upcast(index.open(segment, verify=verify)).select(names)


def _follows(before: SegmentInfo, after: SegmentInfo) -> bool:
    """Whether the rows of `after` begin in the file where those of `before` end."""
    if before.file is None or after.file is None or before.layout != after.layout:
        return False
    end = before.file.row_offset + before.rows
    return dataclasses.replace(before.file, row_offset=end, rows=after.rows) == after.file


def _as_one(run: list[SegmentInfo]) -> SegmentInfo:
    """A segment with the rows of all in a run."""
    if len(run) == 1 or run[0].file is None:
        return run[0]
    rows = sum(s.rows for s in run)
    file = dataclasses.replace(run[0].file, rows=rows)
    return dataclasses.replace(run[0], rows=rows, file=file)


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
