"""Hot segments: one uncompressed Arrow IPC file for the rows of one kind in one commit.

A file is named by its hash. It says in its own metadata who wrote it (run, branch, producer, epoch,
number), so that a catalog can be made from the files. It is checked against the hash in the catalog
before its first use in a process, then read in place.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ledger.canonical import canonical_json
from ledger.errors import Corrupt, IncompatibleFormat, NotFound, explain
from ledger.hashing import file_hash
from ledger.schema import arrow_schema, table_kind, table_layout
from ledger.storage import ObjectStore, Stamp

__all__ = [
    "HOT_FORMAT",
    "Identity",
    "SegmentFile",
    "SegmentReader",
    "hot_folder",
    "read_identity",
    "segment_file",
    "serialise",
]

HOT_FORMAT = "arrow-ipc"
_IDENTITY = b"ledger.identity"
_IN_PIECES_FROM_BYTES = 1 << 18
"""Smaller segments are copied into one buffer, which costs less than handing over the pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who wrote a segment, under which idempotency key, and where in the commit it stands."""

    run_id: str
    branch: str
    producer: str
    epoch: int
    producer_seq: int
    part: int
    """Number of the segment within its commit."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentFile:
    """Where the rows of a segment lie."""

    path: str
    format: str
    row_offset: int
    """First row of the segment within the file."""
    rows: int
    file_hash: bytes
    size_bytes: int


def hot_folder(run_id: str, kind: str) -> str:
    """The folder of a run's hot segments of one kind."""
    return f"runs/{run_id}/hot/{kind}"


def serialise(table: pa.Table, identity: Identity) -> list[Any]:
    """The bytes of a hot segment, in pieces; large ones lie in the table's own memory."""
    metadata = dict(table.schema.metadata)
    metadata[_IDENTITY] = canonical_json(identity).encode()
    whole = table.combine_chunks().replace_schema_metadata(metadata)
    if whole.nbytes >= _IN_PIECES_FROM_BYTES:
        pieces = _Pieces()
        with (
            pa.PythonFile(pieces, "w") as sink,
            pa.ipc.new_file(sink, whole.schema) as writer,
        ):
            writer.write_table(whole)
        return pieces.joined()
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, whole.schema) as writer:
        writer.write_table(whole)
    return [buffer.getvalue()]


def segment_file(folder: str, rows: int, pieces: Sequence[Any]) -> SegmentFile:
    """What a segment with these bytes is called, and what is known of it."""
    digest = file_hash(*pieces)
    size = sum(memoryview(piece).nbytes for piece in pieces)
    return SegmentFile(f"{folder}/{digest.hex()}.arrow", HOT_FORMAT, 0, rows, digest, size)


class _Pieces:
    """A file for Arrow to write to, which keeps what it is given without a copy."""

    closed = False

    def __init__(self) -> None:
        self._given: list[Any] = []

    def write(self, data: Any) -> int:
        self._given.append(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def joined(self) -> list[Any]:
        """The pieces in order, small neighbours as one."""
        joined: list[Any] = []
        small = bytearray()
        for piece in self._given:
            if memoryview(piece).nbytes < _IN_PIECES_FROM_BYTES:
                small += memoryview(piece).cast("B")
                continue
            if small:
                joined.append(bytes(small))
                small = bytearray()
            joined.append(piece)
        if small:
            joined.append(bytes(small))
        return joined


def read_identity(table: pa.Table) -> Identity:
    """The identity in a segment's metadata.

    Raises:
        Corrupt: it has none.
    """
    try:
        return Identity(**json.loads(table.schema.metadata[_IDENTITY]))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(explain("a segment does not say who wrote it", found=repr(error))) from error


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
