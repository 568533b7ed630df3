"""Opening segments: checked against the hash in the catalog before their first use in a process."""

from __future__ import annotations

import threading

import pyarrow as pa

from ledger.errors import Corrupt, IncompatibleFormat, NotFound, explain
from ledger.hashing import file_hash
from ledger.schema import arrow_schema, table_kind, table_layout
from ledger.segment import HOT_FORMAT, SegmentFile
from ledger.storage import ObjectStore, Stamp

__all__ = ["SegmentReader"]


class SegmentReader:
    """Opens segments of one store; remembers which files this process has checked already."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._checked: dict[str, tuple[Stamp, bytes]] = {}
        self._open: dict[str, tuple[Stamp, pa.Table]] = {}
        self._lock = threading.Lock()

    def open(self, file: SegmentFile, kind: str, layout: int, *, verify: bool = True) -> pa.Table:
        """The rows of a segment as a table on the file's own memory.

        `verify=False` leaves the hash out: a flipped bit then goes unnoticed.

        Raises:
            Corrupt: the file is missing, truncated, or not what was committed.
            IncompatibleFormat: a newer version wrote it.
        """
        if file.format != HOT_FORMAT:
            raise IncompatibleFormat(
                explain(
                    "a segment has a format that is not known",
                    on=file.path,
                    expected=HOT_FORMAT,
                    found=file.format,
                )
            )
        try:
            stamp = self._store.stamp(file.path)
            with self._lock:
                kept = self._open.get(file.path)
            if kept is not None and kept[0] == stamp:
                table = kept[1]
                if verify:
                    self._check(file, stamp, None)
            else:
                data = self._store.read(file.path)
                if verify:
                    self._check(file, stamp, data)
                table = _parse(file, data)
                with self._lock:
                    self._open[file.path] = (stamp, table)
        except NotFound as error:
            raise Corrupt(
                explain(
                    "a segment is missing",
                    on=file.path,
                    expected=f"{file.size_bytes} bytes with blake3 {file.file_hash.hex()}",
                    found="no such file",
                    do="bring the file back from a copy of the ledger; `ledger verify` lists all",
                )
            ) from error
        _require_schema(file, table, kind, layout)
        if file.row_offset == 0 and file.rows == table.num_rows:
            return table
        return table.slice(file.row_offset, file.rows)

    def size(self, file: SegmentFile) -> int:
        """Bytes of the file as it is now. Raises: NotFound."""
        return self._store.stamp(file.path)[0]

    def _check(self, file: SegmentFile, stamp: Stamp, data: pa.Buffer | None) -> None:
        with self._lock:
            if self._checked.get(file.path) == (stamp, file.file_hash):
                return
        found = file_hash(self._store.read(file.path) if data is None else data)
        if found != file.file_hash:
            raise Corrupt(
                explain(
                    "a segment is not what was committed",
                    on=file.path,
                    expected=f"{file.size_bytes} bytes with blake3 {file.file_hash.hex()}",
                    found=f"{stamp[0]} bytes with blake3 {found.hex()}",
                    do="bring the file back from a copy of the ledger; `ledger verify` lists all",
                )
            )
        with self._lock:
            self._checked[file.path] = (stamp, file.file_hash)


def _parse(file: SegmentFile, data: pa.Buffer) -> pa.Table:
    try:
        return pa.ipc.open_file(data).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(
            explain(
                "a segment is not an Arrow file",
                on=file.path,
                expected=f"{file.format} with blake3 {file.file_hash.hex()}",
                found=f"{type(error).__name__}: {error}",
            )
        ) from error


def _require_schema(file: SegmentFile, table: pa.Table, kind: str, layout: int) -> None:
    expected = arrow_schema(kind, layout)
    if not table.schema.equals(expected) or table.num_rows < file.row_offset + file.rows:
        raise Corrupt(
            explain(
                "a segment does not hold what the catalog says",
                on=file.path,
                expected=f"rows {file.row_offset} to {file.row_offset + file.rows} of {kind}, "
                f"layout {layout}: {expected.names}",
                found=f"{table.num_rows} rows: {table.column_names}",
            )
        )
    if (table_kind(table), table_layout(table)) != (kind, layout):
        raise Corrupt(
            explain(
                "a segment is of another kind than the catalog says",
                on=file.path,
                expected=f"{kind}, layout {layout}",
                found=f"{table_kind(table)}, layout {table_layout(table)}",
            )
        )
