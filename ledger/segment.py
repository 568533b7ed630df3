"""Hot segments: uncompressed Arrow IPC files, each with the rows of one kind.

A file is named by its hash. It says in its own metadata who wrote it (run, branch, producer, epoch,
number), so that a catalog can be made from the files. One that was written for several appends at
once holds a segment of each, one after the other, and names them all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ledger.encode_plain import Fill
from ledger.errors import Corrupt, explain
from ledger.hashing import file_hash

__all__ = [
    "HOT_FORMAT",
    "Identity",
    "PiecesToFill",
    "SegmentFile",
    "hot_folder",
    "read_identities",
    "read_identity",
    "segment_file",
    "serialise",
]

HOT_FORMAT = "arrow-ipc"
_IDENTITY = b"ledger.identity"
_IDENTITIES = b"ledger.identities"
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


def serialise(table: pa.Table, *segments: tuple[Identity, int] | Identity) -> list[Any]:
    """The bytes of a hot file, in pieces; large ones lie in the table's own memory.

    `segments` are the segments that the table holds, in order: identities with their rows, which
    may be left out of an only one.
    """
    metadata = dict(table.schema.metadata)
    if len(segments) == 1:
        (only,) = segments
        identity = only if isinstance(only, Identity) else only[0]
        metadata[_IDENTITY] = _json(dataclasses.asdict(identity))
    else:
        metadata[_IDENTITIES] = _json(
            [dataclasses.asdict(identity) | {"rows": rows} for identity, rows in segments]  # type: ignore[misc]
        )
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


def _json(value: Any) -> bytes:
    # As canonical_json, of what has only texts and whole numbers in it: every append pays for it.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def segment_file(folder: str, rows: int, pieces: Sequence[Any]) -> SegmentFile:
    """What a segment with these bytes is called, and what is known of it."""
    digest = file_hash(*pieces)
    size = sum(memoryview(piece).nbytes for piece in pieces)
    return SegmentFile(f"{folder}/{digest.hex()}.arrow", HOT_FORMAT, 0, rows, digest, size)


class PiecesToFill(Sequence[Any]):
    """Pieces of a file, of which some wait for their bytes: who goes through them waits as well."""

    def __init__(self, pieces: Sequence[Any], fills: Sequence[Fill]) -> None:
        self._pieces = pieces
        self._waits = [_overlapping(piece, fills) for piece in pieces]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: Any) -> Any:
        for fill in self._waits[number]:
            fill.wait()
        return self._pieces[number]


def _overlapping(piece: Any, fills: Sequence[Fill]) -> list[Fill]:
    buffer = pa.py_buffer(piece)
    end = buffer.address + buffer.size
    return [fill for fill in fills if fill.first < end and buffer.address < fill.end]


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
    """The identity in the metadata of a file that holds one segment.

    Raises:
        Corrupt: it has none, or several.
    """
    found = read_identities(table)
    if len(found) != 1:
        raise Corrupt(
            explain("a segment does not say who wrote it", expected="one", found=len(found))
        )
    return found[0][0]


def read_identities(table: pa.Table) -> list[tuple[Identity, int, int]]:
    """The segments in a hot file, by its metadata: identity, first row, number of rows.

    `table` is the whole file, or a slice of it: the rows are those of the file.

    Raises:
        Corrupt: it says nothing, or not what can be.
    """
    metadata = table.schema.metadata or {}
    try:
        if _IDENTITY in metadata:
            return [(Identity(**json.loads(metadata[_IDENTITY])), 0, table.num_rows)]
        found = []
        offset = 0
        for fields in json.loads(metadata[_IDENTITIES]):
            rows = int(fields.pop("rows"))
            found.append((Identity(**fields), offset, rows))
            offset += rows
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(explain("a segment does not say who wrote it", found=repr(error))) from error
