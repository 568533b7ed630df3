"""What names a set of weights: one record a tensor, and a root over all of them (invariant IV)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from blake3 import blake3

from ledger.canonical import canonical_json

__all__ = ["TensorRecord", "first_difference", "tensor_record", "weights_root"]

_THREADS_FROM_BYTES = 1 << 20  # below, starting threads costs more than they save


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRecord:
    """Identity of one tensor, wherever and in whatever shards its bytes lie."""

    name: str
    """Canonical Hugging Face name."""
    dtype: str
    """'float32', 'bfloat16', …"""
    shape: tuple[int, ...]
    checksum: bytes
    """blake3 (32 bytes) of the contiguous little-endian bytes in C order."""


def tensor_record(name: str, dtype: str, shape: Sequence[int], data: Any) -> TensorRecord:
    """The record of a tensor whose contiguous little-endian bytes (C order) are `data`.

    `data` is anything with the buffer protocol: a C-contiguous array, a memoryview, bytes.
    """
    view = memoryview(data).cast("B")
    threads = blake3.AUTO if view.nbytes >= _THREADS_FROM_BYTES else 1
    checksum = blake3(view, max_threads=threads).digest()
    return TensorRecord(name, dtype, tuple(int(n) for n in shape), checksum)


def weights_root(records: Iterable[TensorRecord]) -> bytes:
    """blake3 (32 bytes) over the records sorted by name: equal roots mean equal weights."""
    ordered = sorted(records, key=lambda r: r.name)
    rows = [[r.name, r.dtype, list(r.shape), r.checksum.hex()] for r in ordered]
    return blake3(canonical_json(["weights", rows]).encode()).digest()


def first_difference(expected: Iterable[TensorRecord], found: Iterable[TensorRecord]) -> str | None:
    """Where two sets of weights first differ, in the order of names; None where they are equal.

    The text names the tensor and gives both shapes, dtypes or checksums.
    """
    left = {r.name: r for r in expected}
    right = {r.name: r for r in found}
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a is None:
            return f"tensor {name!r}: not expected, but found with shape {list(right[name].shape)}"
        if b is None:
            return f"tensor {name!r}: expected with shape {list(a.shape)}, but missing"
        if a.shape != b.shape:
            return f"tensor {name!r}: shape {list(a.shape)} expected, {list(b.shape)} found"
        if a.dtype != b.dtype:
            return f"tensor {name!r}: dtype {a.dtype} expected, {b.dtype} found"
        if a.checksum != b.checksum:
            return f"tensor {name!r}: blake3 {a.checksum.hex()} expected, {b.checksum.hex()} found"
    return None
