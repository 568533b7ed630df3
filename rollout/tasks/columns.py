"""Parquet and Arrow files by row number: the columns that are needed, a piece at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ledger.errors import InvalidArgument, explain
from rollout.tasks.tables import FileState, file_digest

__all__ = ["CACHE_BYTES", "ArrowFile", "ParquetTable"]

CACHE_BYTES = 1 << 30
"""Decoded row groups that a Parquet file keeps: where it is shuffled and larger than this, nearly
every row decodes a row group again."""


class ParquetTable:
    """One Parquet file. A row's group is decoded as a whole; the last ones used are kept."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """Read the footer and digest the file. Raises NotFound or InvalidArgument."""
        self._path, self._state = path, FileState.of(path)
        self.digest = file_digest(self._state)
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "a Parquet file", error) from error
        names = self._file.schema_arrow.names
        self._columns = [name for name in columns if name in names]
        meta = self._file.metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, number: int) -> Mapping[str, Any]:
        """As `Table.row`; the columns that were asked for and exist."""
        self._state.check()
        at = int(np.searchsorted(self._ends, number, side="right"))
        group = self._group(at)
        return _one(group, number - (int(self._ends[at - 1]) if at else 0))

    def place(self, number: int) -> str:
        """The file and the row, counted from 0."""
        return f"{self._path}, row {number}"

    def _group(self, at: int) -> pa.Table:
        with self._lock:
            found = self._groups.pop(at, None)
            if found is None:
                try:
                    found = self._file.read_row_group(at, columns=self._columns)
                except (pa.ArrowException, OSError) as error:
                    raise _unreadable(self._path, f"row group {at}", error) from error
            self._groups[at] = found
            while len(self._groups) > 1 and self._cached_bytes() > CACHE_BYTES:
                self._groups.popitem(last=False)
            return found

    def _cached_bytes(self) -> int:
        return sum(int(group.nbytes) for group in self._groups.values())


class ArrowFile:
    """One file of `Dataset.save_to_disk`: an Arrow stream, mapped and not copied."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """Find the record batches and digest the file. Raises NotFound or InvalidArgument."""
        self._path, self._state = path, FileState.of(path)
        self.digest = file_digest(self._state)
        try:
            with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
                table = stream.read_all()
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "an Arrow stream", error) from error
        self._table = table.select([name for name in columns if name in table.column_names])
        self._size = int(table.num_rows)

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> Mapping[str, Any]:
        """As `Table.row`; the columns that were asked for and exist."""
        self._state.check()
        return _one(self._table, number)

    def place(self, number: int) -> str:
        """The file and the row, counted from 0."""
        return f"{self._path}, row {number}"


def _one(table: pa.Table, number: int) -> dict[str, Any]:
    return {name: table[name][number].as_py() for name in table.column_names}


def _unreadable(path: Path, expected: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "opening prompt data",
            on=str(path),
            expected=expected,
            found=f"{type(error).__name__}: {error}".splitlines()[0],
            do="write the file again",
        )
    )
