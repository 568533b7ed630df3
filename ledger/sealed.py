"""Sealed files: Parquet that any reader understands, with many segments of one kind and layout.

Columns are run_id, branch and seq, then the event's own. Token ids are dictionary-encoded, lists of
float32 byte-stream-split (a dictionary inflates log-probabilities), binary values plain; all
compressed with zstd(1), pages with checksums. A row group holds whole segments. The file is named
by its hash and says in its own metadata which segments it holds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ledger.canonical import canonical_json
from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, explain
from ledger.schema import arrow_schema

__all__ = [
    "SEALED_FORMAT",
    "Held",
    "SealedFile",
    "SealedWriter",
    "read_held",
    "sealed_folder",
]

SEALED_FORMAT = "parquet"

_HELD = "ledger.segments"
_GROUP_BYTES = 32 << 20
"""Raw bytes of a row group from which on the next segment begins another: what is decoded at once,
and what a dictionary of token ids is shared by."""

_LEVEL = 1  # of zstd: higher ones are slower and gain nothing on this data


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """One segment in a sealed file."""

    first_seq: int
    rows: int
    row_offset: int
    """Its first row within the file."""
    logical_hash: bytes


def sealed_folder(run_id: str, kind: str) -> str:
    """The folder of a run's sealed files of one kind."""
    return f"runs/{run_id}/sealed/{kind}"


class SealedWriter:
    """Puts segments of one kind and layout of a run together into one file, in memory."""

    def __init__(self, run_id: str, kind: str, layout: int) -> None:
        self.held: list[Held] = []
        self.rows = 0
        self._run_id = run_id
        self._own = [f for f in arrow_schema(kind, layout) if f.name not in _PLACE]
        metadata = arrow_schema(kind, layout).metadata
        place = [pa.field(name, _PLACE[name], nullable=False) for name in _PLACE]
        own = [f.with_type(_for_everybody(f.type)) for f in self._own]
        self._schema = pa.schema([*place, *own], metadata=metadata)
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, self._schema, **_options(self._schema))
        self._group: list[pa.Table] = []
        self._group_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes so far; the last row group counts when it is complete."""
        return int(self._sink.tell())

    def add(self, segment: SegmentInfo, table: pa.Table) -> None:
        """The next segment, with its rows in their own layout."""
        rows = table.num_rows
        place = [
            pa.repeat(pa.scalar(segment.run_id, pa.string()), rows),
            pa.repeat(pa.scalar(segment.branch, pa.string()), rows),
            pa.array(np.arange(segment.first_seq, segment.first_seq + rows)),
        ]
        own = [table.column(f.name).cast(_for_everybody(f.type)) for f in self._own]
        self._group.append(pa.Table.from_arrays([*place, *own], schema=self._schema))
        self._group_bytes += table.nbytes
        self.held.append(Held(segment.first_seq, rows, self.rows, segment.logical_hash))
        self.rows += rows
        if self._group_bytes >= _GROUP_BYTES:
            self._end_group()

    def finish(self) -> pa.Buffer:
        """The bytes of the file. Nothing can be added afterwards."""
        self._end_group()
        self._writer.add_key_value_metadata({_HELD: canonical_json(self.held)})
        self._writer.close()
        return self._sink.getvalue()

    def _end_group(self) -> None:
        if self._group:
            # One chunk a column: the writer encodes each chunk's strings and lists apart.
            whole = pa.concat_tables(self._group).combine_chunks()
            self._writer.write_table(whole, row_group_size=whole.num_rows)
            self._group, self._group_bytes = [], 0


def _for_everybody(declared: pa.DataType) -> pa.DataType:
    """The type in the file: pandas cannot read lists of binary values of one width."""
    if pa.types.is_list(declared) and pa.types.is_fixed_size_binary(declared.value_type):
        return pa.list_(pa.binary())
    return declared


_PLACE = {"run_id": pa.string(), "branch": pa.string(), "seq": pa.int64()}


def _options(schema: pa.Schema) -> dict[str, Any]:
    dictionary: list[str] = []
    encodings: dict[str, str] = {}
    statistics: list[str] = []
    for field in schema:
        path, inner = _leaf(field.name, field.type)
        nested = path != field.name
        if nested and pa.types.is_float32(inner):
            encodings[path] = "BYTE_STREAM_SPLIT"
        elif field.name == "seq":
            encodings[path] = "DELTA_BINARY_PACKED"
        elif pa.types.is_large_binary(inner) or (nested and pa.types.is_binary(inner)):
            encodings[path] = "PLAIN"
        else:
            dictionary.append(path)
        if not nested and (pa.types.is_integer(inner) or pa.types.is_timestamp(inner)):
            statistics.append(path)
    return {
        "version": "2.6",
        "compression": "zstd",
        "compression_level": _LEVEL,
        "use_dictionary": dictionary,
        "column_encoding": encodings,
        "write_statistics": [*statistics, "run_id", "branch"],
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _leaf(name: str, arrow_type: pa.DataType) -> tuple[str, pa.DataType]:
    while pa.types.is_list(arrow_type):
        name, arrow_type = f"{name}.list.element", arrow_type.value_type
    return name, arrow_type


class SealedFile:
    """An opened sealed file. Threads may share it."""

    def __init__(self, path: str, data: pa.Buffer) -> None:
        """Raises: Corrupt where it is no Parquet file."""
        self.path = path
        self._data = data
        try:
            self._metadata = pq.read_metadata(pa.BufferReader(data))
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        counts = [
            self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)
        ]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(int).tolist()

    @property
    def rows(self) -> int:
        """Rows of the whole file."""
        return int(self._starts[-1])

    def held(self) -> list[Held]:
        """The segments in it, in order. Raises: Corrupt."""
        try:
            listed = json.loads((self._metadata.metadata or {})[_HELD.encode()])
            return [
                Held(h["first_seq"], h["rows"], h["row_offset"], bytes.fromhex(h["logical_hash"]))
                for h in listed
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(self.path, error) from error

    def groups_of(self, row_offset: int, rows: int) -> list[tuple[int, int, int]]:
        """(row group, first row in it, rows of it) that make up a range of rows."""
        made = []
        for i, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            first, last = max(start, row_offset), min(end, row_offset + rows)
            if first < last:
                made.append((i, first - start, last - first))
        return made

    def read_group(self, group: int, names: Sequence[str]) -> pa.Table:
        """The columns `names` of a row group, decoded; nothing else is. Raises: Corrupt."""
        try:
            opened = pq.ParquetFile(pa.BufferReader(self._data), metadata=self._metadata)
            return opened.read_row_group(group, columns=list(names))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self.path, error) from error


def read_held(path: str, data: pa.Buffer) -> list[Held]:
    """The segments that a sealed file says it holds. Raises: Corrupt."""
    return SealedFile(path, data).held()


def _unreadable(path: str, error: Exception) -> Corrupt:
    return Corrupt(
        explain(
            "a sealed file was not understood",
            on=path,
            expected="Parquet with the segments it holds in its metadata",
            found=f"{type(error).__name__}: {error}",
            do="bring the file back from a copy of the ledger; `ledger verify` lists all",
        )
    )
