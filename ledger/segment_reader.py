"""Opening segments of either format: checked before their first use in a process, then kept.

A file is checked against the hash in the catalog. A hot segment is read in place: where the store
can map files, keeping it costs no memory. What a sealed file decodes to, and what was fetched from
elsewhere, is kept as far as `keep_bytes` goes, the longest unused leaving first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pyarrow as pa

from ledger.errors import Corrupt, IncompatibleFormat, NotFound, SegmentMissing, explain
from ledger.hashing import file_hash
from ledger.kept import KEEP_BYTES, Kept
from ledger.schema import KIND, LAYOUT, arrow_schema
from ledger.sealed import SEALED_FORMAT, SealedFile
from ledger.segment import HOT_FORMAT, SegmentFile
from ledger.storage import ObjectStore, Stamp

__all__ = ["SegmentReader"]


class SegmentReader:
    """Opens segments of one store. Threads may share it."""

    def __init__(self, store: ObjectStore, keep_bytes: int = KEEP_BYTES) -> None:
        self._store = store
        self._checked: dict[str, tuple[Stamp, bytes]] = {}
        self._kept = Kept(keep_bytes)
        self._lock = threading.Lock()

    def open(
        self,
        file: SegmentFile,
        kind: str,
        layout: int,
        *,
        verify: bool = True,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The rows of a segment as a table, read-only, in its own layout.

        `columns` names those that are wanted, in that order; of a sealed file nothing else is
        decoded. `verify=False` leaves the hash out: a flipped bit then goes unnoticed (a sealed
        page that no longer decodes is noticed anyway).

        Raises:
            SegmentMissing: the file is not there.
            Corrupt: the file is truncated, or not what was committed.
            IncompatibleFormat: a newer version wrote it.
        """
        if file.format not in (HOT_FORMAT, SEALED_FORMAT):
            raise IncompatibleFormat(
                explain(
                    "a segment has a format that is not known",
                    on=file.path,
                    expected=f"{HOT_FORMAT} or {SEALED_FORMAT}",
                    found=file.format,
                )
            )
        try:
            stamp, opened = self._opened(file, verify)
        except NotFound as error:
            raise SegmentMissing(
                explain(
                    "a segment is missing",
                    on=file.path,
                    expected=f"{file.size_bytes} bytes with blake3 {file.file_hash.hex()}",
                    found="no such file",
                    do="bring the file back from a copy of the ledger; `ledger verify` lists all",
                )
            ) from error
        schema = arrow_schema(kind, layout)
        names = schema.names if columns is None else list(columns)
        if isinstance(opened, SealedFile):
            _require_kind(file, opened.schema.metadata or {}, kind, layout)
            return self._decoded(file, stamp, opened, _subset(schema, names))
        _require_schema(file, opened, kind, layout)
        table = opened if columns is None else opened.select(names)
        if file.row_offset == 0 and file.rows == table.num_rows:
            return table
        return table.slice(file.row_offset, file.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded and fetched segments that are kept now."""
        return self._kept.size_bytes

    @property
    def kept_items(self) -> int:
        """Files and decoded columns that are kept now."""
        return len(self._kept)

    def size(self, file: SegmentFile) -> int:
        """Bytes of the file as it is now. Raises: NotFound."""
        return self._store.stamp(file.path).size_bytes

    def _opened(self, file: SegmentFile, verify: bool) -> tuple[Stamp, pa.Table | SealedFile]:
        stamp = self._store.stamp(file.path)
        key = (file.path, stamp)
        opened = self._kept.get(key)
        if opened is not None:
            if verify:
                self._check(file, stamp, None)
            return stamp, opened
        data = self._store.read(file.path)
        if verify:
            self._check(file, stamp, data)
        opened = SealedFile(file.path, data) if file.format == SEALED_FORMAT else _parse(file, data)
        # Local files are mapped, or so small that they count as nothing.
        self._kept.put(key, opened, 0 if self._store.root is not None else data.size)
        return stamp, opened

    def _decoded(
        self, file: SegmentFile, stamp: Stamp, opened: SealedFile, wanted: pa.Schema
    ) -> pa.Table:
        if opened.rows < file.row_offset + file.rows:
            raise _other_rows(file, wanted, opened.rows, wanted.names)
        parts = []
        for group, first, rows in opened.groups_of(file.row_offset, file.rows):
            missing = []
            found: dict[str, pa.ChunkedArray] = {}
            for name in wanted.names:
                column = self._kept.get((file.path, stamp, group, name))
                if column is None:
                    missing.append(name)
                else:
                    found[name] = column
            if missing:
                table = opened.read_group(group, missing)
                for name in missing:
                    if name not in table.column_names:
                        raise _other_rows(file, wanted, opened.rows, table.column_names)
                    column = _as_declared(file, table.column(name), wanted.field(name))
                    self._kept.put((file.path, stamp, group, name), column, column.nbytes)
                    found[name] = column
            columns = [found[name].slice(first, rows) for name in wanted.names]
            parts.append(pa.Table.from_arrays(columns, schema=wanted))
        return pa.concat_tables(parts) if parts else wanted.empty_table()

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
                    found=f"{stamp.size_bytes} bytes with blake3 {found.hex()}",
                    do="bring the file back from a copy of the ledger; `ledger verify` lists all",
                )
            )
        with self._lock:
            self._checked[file.path] = (stamp, file.file_hash)


def _subset(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names], metadata=schema.metadata)


def _as_declared(file: SegmentFile, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise Corrupt(
            explain(
                "a sealed file holds another type than its layout says",
                on=f"{file.path}, {field.name}",
                expected=field.type,
                found=column.type,
            )
        ) from error


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
        raise _other_rows(file, expected, table.num_rows, table.column_names)
    _require_kind(file, table.schema.metadata or {}, kind, layout)


def _require_kind(file: SegmentFile, metadata: dict[bytes, bytes], kind: str, layout: int) -> None:
    found = (metadata.get(KIND, b"").decode(), metadata.get(LAYOUT, b"").decode())
    if found != (kind, str(layout)):
        raise Corrupt(
            explain(
                "a segment is of another kind than the catalog says",
                on=file.path,
                expected=f"{kind}, layout {layout}",
                found=f"{found[0]}, layout {found[1]}",
            )
        )


def _other_rows(file: SegmentFile, expected: pa.Schema, rows: int, names: list[str]) -> Corrupt:
    metadata = expected.metadata or {}
    return Corrupt(
        explain(
            "a segment does not hold what the catalog says",
            on=file.path,
            expected=f"rows {file.row_offset} to {file.row_offset + file.rows} of "
            f"{metadata.get(KIND, b'?').decode()}, "
            f"layout {metadata.get(LAYOUT, b'?').decode()}: {expected.names}",
            found=f"{rows} rows: {names}",
        )
    )
