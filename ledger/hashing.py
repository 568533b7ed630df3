"""Hashes over what events *mean*, not over how a file spells it.

The logical hash of a table depends on kind, layout, field ids, types, nulls and values alone:
not on chunks, slices, list offsets, the bytes under a null, nor on the file format. So compaction
into another format leaves every link of the chain valid. All hashes are blake3, 32 bytes.

A column is taken apart into *streams* of bytes: nulls, lengths, values. Both the logical hash (a
digest a stream) and the content hash of a row (its slice of every stream) are made from them.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from ledger.fields import Column
from ledger.schema import columns_of, table_kind, table_layout, type_name

__all__ = [
    "GENESIS",
    "chain_link",
    "column_digests",
    "digest_of_columns",
    "file_hash",
    "idempotency_key",
    "logical_hash",
    "multiset_digest",
    "row_content_hashes",
    "sliced_column_digests",
]

GENESIS = bytes(32)
"""The link before a run's first."""

_DIGEST_MARK = struct.pack("<bq", 1, 32)
"""What `_pack` puts before a digest."""

_THREADS_FROM_BYTES = 1 << 20  # below, starting threads costs more than they save
# With two cores one is busy with the disk while an append hashes: a second thread only waits.
_THREADS = blake3.AUTO if (os.cpu_count() or 1) > 2 else 1


def file_hash(*pieces: Any) -> bytes:
    """blake3 of a whole file, given in one or more pieces with the buffer protocol."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    threads = _THREADS if sum(v.nbytes for v in views) >= _THREADS_FROM_BYTES else 1
    hasher = blake3(max_threads=threads)
    for view in views:
        hasher.update(view)
    return hasher.digest()


def logical_hash(table: pa.Table) -> bytes:
    """The hash of a table's rows as its layout defines them. Other columns are left out."""
    return digest_of_columns(
        table_kind(table), table_layout(table), table.num_rows, column_digests(table)
    )


def digest_of_columns(kind: str, layout: int, rows: int, digests: dict[int, bytes]) -> bytes:
    """The hash over digests of columns, by field id. With all columns it is the logical hash."""
    head = _pack(b"ledger.logical.1", kind.encode(), layout, rows, len(digests))
    body = b"".join(_pack(field_id, digests[field_id]) for field_id in sorted(digests))
    return blake3(head + body).digest()


def column_digests(table: pa.Table) -> dict[int, bytes]:
    """Field id → digest of that column."""
    kind, layout = table_kind(table), table_layout(table)
    return {c.field_id: _column_digest(c, table.column(c.name)) for c in columns_of(kind, layout)}


def sliced_column_digests(batch: pa.RecordBatch, bounds: Sequence[int]) -> list[dict[int, bytes]]:
    """For each slice of rows, bounds[i] to bounds[i + 1], what `column_digests` gives of it.

    Many slices cost little more than one: each column is taken apart once. The batch must have the
    columns of its layout, in their declared types.
    """
    kind, layout = table_kind(batch), table_layout(batch)
    slices = len(bounds) - 1
    edges = np.asarray(bounds, np.int64)
    found: list[dict[int, bytes]] = [{} for _ in range(slices)]
    for column in columns_of(kind, layout):
        array = _as_declared(batch.column(column.name), column.type)
        streams = [
            (_view(data), ends.tolist()) for data, ends in _with_validity(column, array, edges)
        ]
        head = _digest_head(column)
        for i in range(slices):
            body = [head]
            for view, ends in streams:
                piece = view[ends[i] : ends[i + 1]]
                threads = _THREADS if piece.nbytes >= _THREADS_FROM_BYTES else 1
                body += (_DIGEST_MARK, blake3(piece, max_threads=threads).digest())
            found[i][column.field_id] = blake3(b"".join(body)).digest()
    return found


def _column_digest(column: Column, data: pa.ChunkedArray) -> bytes:
    chunks = data.chunks or [pa.array([], column.type)]
    parts = [_column_streams(column, chunk) for chunk in chunks]
    digests = [_digest(stream) for stream in zip(*parts, strict=True)]
    return blake3(_digest_head(column) + _pack(*digests)).digest()


@functools.cache
def _digest_head(column: Column) -> bytes:
    return _pack(column.field_id, type_name(column.type).encode(), int(column.nullable))


def _column_streams(column: Column, chunk: pa.Array) -> list[np.ndarray]:
    array = _as_declared(chunk, column.type)
    return [data for data, _ in _with_validity(column, array, np.array([0, len(array)]))]


def _with_validity(
    column: Column, array: pa.Array, bounds: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from _streams(array, bounds)
    if column.nullable:
        if array.null_count:
            yield _valid(array).view(np.uint8), bounds
        else:
            yield np.ones(len(array), np.uint8), bounds


def _digest(pieces: Sequence[Any]) -> bytes:
    threads = _THREADS if sum(p.nbytes for p in pieces) >= _THREADS_FROM_BYTES else 1
    if len(pieces) == 1:
        return blake3(pieces[0], max_threads=threads).digest()
    hasher = blake3(max_threads=threads)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def row_content_hashes(table: pa.Table) -> list[bytes]:
    """One hash a row over its *content* columns, in the table's order; empty where it has none.

    A null contributes nothing, so that a nullable column that a later layout adds changes no hash
    of older rows.
    """
    kind = table_kind(table)
    content = [c for c in columns_of(kind, table_layout(table)) if not c.measurement]
    if not content:
        return []
    prefix = _pack(b"ledger.row.1", kind.encode())
    hashes: list[bytes] = []
    for batch in table.select([c.name for c in content]).to_batches():
        hashes += _hash_rows(prefix, content, batch)
    return hashes


def _hash_rows(prefix: bytes, content: Sequence[Column], batch: pa.RecordBatch) -> list[bytes]:
    rows = batch.num_rows
    each = np.arange(rows + 1)
    parts: list[tuple[bytes, np.ndarray | None, list[tuple[memoryview, list[int]]]]] = []
    for column, chunk in zip(content, batch.columns, strict=True):
        array = _as_declared(chunk, column.type)
        streams = [(_view(data), bounds.tolist()) for data, bounds in _streams(array, each)]
        valid = _valid(array) if array.null_count else None
        parts.append((_pack(column.field_id), valid, streams))
    hashes = []
    for row in range(rows):
        hasher = blake3(prefix)
        for header, valid, streams in parts:
            if valid is not None and not valid[row]:
                continue
            pieces = [view[bounds[row] : bounds[row + 1]] for view, bounds in streams]
            hasher.update(header + b"".join(pieces))
        hashes.append(hasher.digest())
    return hashes


def multiset_digest(hashes: dict[str, list[bytes]]) -> bytes:
    """The digest of rows by kind, in which neither their order nor their segments show."""
    hasher = blake3(b"ledger.content.1")
    for kind in sorted(hashes):
        if hashes[kind]:
            hasher.update(_pack(kind.encode(), len(hashes[kind])))
            hasher.update(b"".join(sorted(hashes[kind])))
    return hasher.digest()


def idempotency_key(branch: str, producer: str, epoch: int, producer_seq: int) -> str:
    """The text under which a commit is made at most once, with the branch it goes to."""
    # As canonical_json, of texts and whole numbers: every append pays for it.
    return json.dumps(
        [branch, producer, epoch, producer_seq], separators=(",", ":"), ensure_ascii=False
    )


def chain_link(
    previous: bytes, first_seq: int, kind: str, rows: int, logical: bytes, key: str
) -> bytes:
    """The link of one segment: it covers the whole past of the run through `previous`."""
    return blake3(
        _pack(b"ledger.chain.1", previous, first_seq, kind.encode(), rows, logical, key.encode())
    ).digest()


def _pack(*parts: bytes | int) -> bytes:
    """Bytes from which the parts can be told apart: integers by 8 bytes, texts by length."""
    return b"".join(
        struct.pack("<bq", 0, p) if isinstance(p, int) else struct.pack("<bq", 1, len(p)) + p
        for p in parts
    )


def _as_declared(array: pa.Array, declared: pa.DataType) -> pa.Array:
    """The array in its declared type: other formats give a mask as booleans, say."""
    if array.type.equals(declared):
        return array
    return array if _name_or_none(array.type) == type_name(declared) else array.cast(declared)


@functools.cache
def _name_or_none(arrow_type: pa.DataType) -> str | None:
    """As `type_name`; None for a type that no event declares."""
    try:
        return type_name(arrow_type)
    except TypeError:
        return None


def _streams(array: pa.Array, bounds: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The bytes (1-D uint8) of each stream of `array`, and `bounds` (in elements) in bytes."""
    arrow_type = array.type
    # Compared by number: this runs for every column of every append.
    type_id = arrow_type.id
    if type_id == _LIST:
        starts = _offsets(array, np.int32).astype(np.int64)
        lengths = starts[1:] - starts[:-1]
        if array.null_count:
            lengths[~_valid(array)] = 0
            values = array.flatten()
            starts = np.concatenate([[0], np.cumsum(lengths)])
        else:
            # The same values; flatten takes longer to start than a short column takes to hash.
            first = int(starts[0])
            values = array.values.slice(first, int(starts[-1]) - first)
            starts -= first
        yield lengths.view(np.uint8), bounds * 8
        yield from _streams(values, starts[bounds])
        return
    if type_id in (_STRING, _LARGE_BINARY):
        width = np.int32 if type_id == _STRING else np.int64
        starts = _offsets(array, width).astype(np.int64)
        lengths = starts[1:] - starts[:-1]
        if array.null_count and lengths[~_valid(array)].any():
            yield from _streams(pc.fill_null(array, "" if type_id == _STRING else b""), bounds)
            return
        raw = _bytes_of(array.buffers()[2])[starts[0] : starts[-1]]
        starts -= starts[0]
        yield lengths.view(np.uint8), bounds * 8
        yield raw, starts[bounds]
        return
    if type_id == _BOOL:
        array = array.cast(pa.uint8())
        width_bytes = 1
    else:
        width_bytes = arrow_type.bit_width // 8
    raw = _bytes_of(array.buffers()[1])
    raw = raw[array.offset * width_bytes : (array.offset + len(array)) * width_bytes]
    if array.null_count:
        raw = raw.reshape(len(array), width_bytes).copy()
        raw[~_valid(array)] = 0
        raw = raw.reshape(-1)
    yield raw, bounds * width_bytes


_LIST, _STRING, _LARGE_BINARY, _BOOL = (
    arrow_type.id
    for arrow_type in (pa.list_(pa.null()), pa.string(), pa.large_binary(), pa.bool_())
)


def _valid(array: pa.Array) -> np.ndarray:
    """[len] bool: where the array, which has nulls, has values."""
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    end = array.offset + len(array)
    return np.unpackbits(bits, count=end, bitorder="little")[array.offset :].view(bool)


def _offsets(array: pa.Array, width: Any) -> np.ndarray:
    """[len + 1] where each value begins and the last one ends."""
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array) + 1, width)
    return np.frombuffer(buffer, width, len(array) + 1, array.offset * width().nbytes)


def _view(data: Any) -> memoryview:
    return memoryview(data)


def _bytes_of(buffer: pa.Buffer | None) -> np.ndarray:
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
