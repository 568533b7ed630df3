"""Hashes over what events *mean*, not over how a file spells it.

The logical hash of a table depends on kind, layout, field ids, types, nulls and values alone:
not on chunks, slices, list offsets, the bytes under a null, nor on the file format. So compaction
into another format leaves every link of the chain valid. All hashes are blake3, 32 bytes.

A column is taken apart into *streams* of bytes: nulls, lengths, values. Both the logical hash (a
digest a stream) and the content hash of a row (its slice of every stream) are made from them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from ledger.canonical import canonical_json
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
]

GENESIS = bytes(32)
"""The link before a run's first."""

_THREADS_FROM_BYTES = 1 << 20  # below, starting threads costs more than they save


def file_hash(*pieces: Any) -> bytes:
    """blake3 of a whole file, given in one or more pieces with the buffer protocol."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    threads = blake3.AUTO if sum(v.nbytes for v in views) >= _THREADS_FROM_BYTES else 1
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


def _column_digest(column: Column, data: pa.ChunkedArray) -> bytes:
    parts = [_column_streams(column, chunk) for chunk in data.chunks or [pa.array([], column.type)]]
    digests = [_digest(stream) for stream in zip(*parts, strict=True)]
    name = type_name(column.type).encode()
    return blake3(_pack(column.field_id, name, int(column.nullable), *digests)).digest()


def _column_streams(column: Column, chunk: pa.Array) -> list[np.ndarray]:
    array = _as_declared(chunk, column.type)
    streams = [stream for stream, _ in _streams(array, np.array([0, len(array)]))]
    if column.nullable:
        if array.null_count:
            streams.append(array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False))
        else:
            streams.append(np.ones(len(array), np.uint8))
    return streams


def _digest(pieces: Sequence[Any]) -> bytes:
    threads = blake3.AUTO if sum(p.nbytes for p in pieces) >= _THREADS_FROM_BYTES else 1
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
        valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
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
    return canonical_json([branch, producer, epoch, producer_seq])


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
    if pa.types.is_list(arrow_type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        lengths = np.diff(offsets)
        if array.null_count:
            lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
        starts = np.concatenate([[0], np.cumsum(lengths)])
        yield lengths.view(np.uint8), bounds * 8
        if array.null_count:
            values = array.flatten()
        else:
            # The same values; flatten takes longer to start than a short column takes to hash.
            values = array.values.slice(int(offsets[0]), int(starts[-1]))
        yield from _streams(values, starts[bounds])
        return
    if pa.types.is_string(arrow_type) or pa.types.is_large_binary(arrow_type):
        if array.null_count:
            array = pc.fill_null(array, "" if pa.types.is_string(arrow_type) else b"")
        width = np.int32 if pa.types.is_string(arrow_type) else np.int64
        _, offset_buffer, data_buffer = array.buffers()
        if offset_buffer is None or len(array) == 0:
            offsets = np.zeros(len(array) + 1, np.int64)
        else:
            offsets = np.frombuffer(
                offset_buffer, width, len(array) + 1, array.offset * width().nbytes
            )
        raw = _bytes_of(data_buffer)[offsets[0] : offsets[-1]]
        starts = offsets.astype(np.int64) - int(offsets[0])
        yield np.diff(starts).view(np.uint8), bounds * 8
        yield raw, starts[bounds]
        return
    width_bytes = 1 if pa.types.is_boolean(arrow_type) else arrow_type.bit_width // 8
    if pa.types.is_boolean(arrow_type):
        array = array.cast(pa.uint8())
    raw = _bytes_of(array.buffers()[1])
    raw = raw[array.offset * width_bytes : (array.offset + len(array)) * width_bytes]
    if array.null_count:
        raw = raw.reshape(len(array), width_bytes).copy()
        raw[array.is_null().to_numpy(zero_copy_only=False)] = 0
        raw = raw.reshape(-1)
    yield raw, bounds * width_bytes


def _view(data: Any) -> memoryview:
    return memoryview(data)


def _bytes_of(buffer: pa.Buffer | None) -> np.ndarray:
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
