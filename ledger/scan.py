"""How DuckDB reads events: as datasets that open nothing before a query asks, and then only that.

DuckDB takes an object of pyarrow's Dataset class and calls its `scanner` once for each scan, with
the columns and the filter that the query needs. Those reach the reader, so that a sealed file is
decoded by columns, and a query that touches no routing opens no routing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset as ds

from ledger.errors import explain
from ledger.schema import arrow_schema

__all__ = ["PLACE_TYPES", "ComputedScan", "EventScan", "Source", "TableSource", "scan_schema"]

_name = pa.dictionary(pa.int32(), pa.string())
PLACE_TYPES = {"run_id": _name, "branch": _name, "seq": pa.int64()}
"""What a reader adds to the columns of an event."""

_WORD = re.compile(r"\w+")


class TableSource(Protocol):
    """What views are built from: a ledger reader, or tables in memory."""

    def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All visible events of `kind`: its columns and run_id, branch, seq. May be empty."""
        ...  # pragma: no cover


class Source:
    """Holds the reader that a connection's scans ask now, and what the reader raised."""

    def __init__(self, reader: TableSource | None = None) -> None:
        self.reader = reader
        self.failure: BaseException | None = None
        """What a scan raised: DuckDB passes on its text only."""

    def fail(self, error: BaseException) -> None:
        """Keep what was raised inside of DuckDB, for who asked the query."""
        self.failure = error

    def present(self) -> TableSource:
        """The reader. Raises RuntimeError outside of a query."""
        if self.reader is None:
            raise RuntimeError(explain("a scan outside of a query"))
        return self.reader

    def read(self, kind: str, columns: Sequence[str]) -> pa.Table:
        """The table of a kind, with these columns in this order and the types of `scan_schema`."""
        schema = scan_schema(kind)
        wanted = pa.schema([schema.field(name) for name in columns])
        table = self.present().table(kind, columns)
        # Where an event has a column of its own that names its place, the last is the reader's.
        last = {name: i for i, name in enumerate(table.column_names)}
        table = table.select([last[name] for name in columns])
        return table if table.schema.types == wanted.types else table.cast(wanted)


class _Scan(ds.Dataset):  # type: ignore[misc]  # pyarrow comes without types
    """What DuckDB takes for a dataset."""

    schema: pa.Schema

    def __init__(self, source: Source) -> None:
        self._source = source

    def _read(self, columns: Sequence[str]) -> pa.Table:
        # Each of the two classes below has its own; a Dataset cannot be an ABC as well.
        raise NotImplementedError

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: pa.compute.Expression | None = None,
        **_: Any,
    ) -> Any:
        """What DuckDB calls to read: an object with `to_reader`."""
        try:
            names = self.schema.names
            wanted = names if columns is None else list(columns)
            if filter is None:
                return _Rows(self._read(wanted))
            # The filter may name columns that the query does not. A word in one of its values
            # may be read too: a column too many, never one too few.
            words = set(_WORD.findall(str(filter)))
            needed = wanted + [name for name in names if name in words and name not in wanted]
            return ds.dataset(self._read(needed)).scanner(columns=wanted, filter=filter)
        except BaseException as error:
            self._source.fail(error)
            raise


class EventScan(_Scan):
    """One kind of event: place first, then its own columns."""

    def __init__(self, source: Source, kind: str) -> None:
        super().__init__(source)
        self._kind = kind

    @property
    def schema(self) -> pa.Schema:
        return scan_schema(self._kind)

    def _read(self, columns: Sequence[str]) -> pa.Table:
        return self._source.read(self._kind, columns)


class ComputedScan(_Scan):
    """Rows that a function computes from the reader, each time they are asked for."""

    def __init__(
        self, source: Source, schema: pa.Schema, compute: Callable[[TableSource], pa.Table]
    ) -> None:
        super().__init__(source)
        self._schema = schema
        self._compute = compute

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def _read(self, columns: Sequence[str]) -> pa.Table:
        return self._compute(self._source.present()).select(list(columns))


class _Rows:
    """What DuckDB needs of a scanner."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def to_reader(self) -> pa.RecordBatchReader:
        return self._table.to_reader()


def scan_schema(kind: str) -> pa.Schema:
    """run_id, branch and seq, then the columns of the event, each once."""
    found = _schemas.get(kind)
    if found is None:
        place = [pa.field(name, type_, nullable=False) for name, type_ in PLACE_TYPES.items()]
        own = [field for field in arrow_schema(kind) if field.name not in PLACE_TYPES]
        found = _schemas[kind] = pa.schema([*place, *own])
    return found


_schemas: dict[str, pa.Schema] = {}
