"""Columns of events as Arrow arrays where every value is of the usual type: no value gets a look.

What is not plain is left to `ledger.encode`, which finds out what is wrong, if anything is.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ledger.errors import StorageFailed, explain
from ledger.fields import Column, Event

__all__ = ["MAX_VALUES", "PLAIN_TYPES", "Fill", "fields_of", "plain_encoders"]

_LATER_FROM_BYTES = 1 << 20
MAX_VALUES = 2**31 - 1
"""Of a list column: its offsets are 32 bit."""


class Fill:
    """Large values of a column whose place is known, and that are copied there later, once."""

    def __init__(self, place: np.ndarray, values: Sequence[np.ndarray]) -> None:
        self._place, self._values = place, values
        self._ended = threading.Event()
        self._failed = False
        self.first = place.ctypes.data
        """Address of the first byte."""
        self.end = self.first + place.nbytes
        """Address after the last one."""

    def run(self) -> None:
        """Copy the values to their place, and let those go on that wait for them."""
        np.concatenate(self._values, out=self._place)
        self._ended.set()

    def give_up(self) -> None:
        """Let those who wait fail, unless the values are there."""
        if not self._ended.is_set():
            self._failed = True
            self._ended.set()

    def wait(self) -> None:
        """Wait until the values are there. Raises StorageFailed if they will never be."""
        self._ended.wait()
        if self._failed:
            raise StorageFailed(explain("values were not written: their append was given up"))


@functools.cache
def fields_of(cls: Any) -> Callable[[Event], tuple[Any, ...]]:
    """A function that gives the fields of an event in the order of the columns."""
    return operator.attrgetter(*(column.name for column in cls.COLUMNS))


PLAIN_TYPES = frozenset({np.ndarray, bool, int, float, str, bytes, type(None)})
_Plain = Callable[[Sequence[Any], list[Fill] | None], pa.Array | None]
"""A column of values of one type, if that is the usual one and all fit; None where one needs a
look."""


@functools.cache
def plain_encoders(cls: Any) -> tuple[_Plain, ...]:
    """For each column of an event class, what encodes it without looking at each value."""
    return tuple(_plain_encoder(column) for column in cls.COLUMNS)


def _plain_encoder(column: Column) -> _Plain:
    arrow_type, nullable = column.type, column.nullable
    usual, encode = _usual(arrow_type)

    def plain(values: Sequence[Any], later: list[Fill] | None) -> pa.Array | None:
        if type(values[0]) is usual:
            return encode(values, later)
        if values[0] is None and nullable:
            return pa.nulls(len(values), arrow_type)
        return None

    return plain


def _usual(arrow_type: pa.DataType) -> tuple[type, _Plain]:
    """The type that values of a column usually have, and how such are encoded."""
    if _is_flat_list(arrow_type):
        return np.ndarray, functools.partial(_plain_lists, arrow_type)
    if pa.types.is_float64(arrow_type):
        return float, lambda values, _: pa.array(np.array(values, np.float64))
    if pa.types.is_integer(arrow_type) or pa.types.is_timestamp(arrow_type):
        dtype = np.dtype(np.int64) if pa.types.is_timestamp(arrow_type) else _dtype(arrow_type)
        return int, functools.partial(_plain_integers, arrow_type, dtype)
    if pa.types.is_string(arrow_type):
        return str, _plain_text
    if pa.types.is_large_binary(arrow_type):
        return bytes, _plain_bytes
    return type(None), _never_plain


def _is_flat_list(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_list(arrow_type)) and bool(
        pa.types.is_integer(arrow_type.value_type) or pa.types.is_floating(arrow_type.value_type)
    )


def _dtype(arrow_type: pa.DataType) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(arrow_type.to_pandas_dtype())
    return found


def _plain_integers(
    arrow_type: pa.DataType, dtype: np.dtype[Any], values: Sequence[int], _: list[Fill] | None
) -> pa.Array | None:
    limits = _limits(dtype)
    if min(values) < limits[0] or max(values) > limits[1]:
        return None
    raw = pa.py_buffer(np.array(values, dtype))
    return pa.Array.from_buffers(arrow_type, len(values), [None, raw])


@functools.cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


_dtype_of: Callable[[np.ndarray], np.dtype[Any]] = operator.attrgetter("dtype")
_ndim_of: Callable[[np.ndarray], int] = operator.attrgetter("ndim")


def _plain_lists(
    arrow_type: pa.DataType, values: Sequence[np.ndarray], later: list[Fill] | None
) -> pa.Array | None:
    dtype = _dtype(arrow_type.value_type)
    if set(map(_dtype_of, values)) != {dtype} or set(map(_ndim_of, values)) != {1}:
        return None
    ends = np.cumsum(list(map(len, values)))
    if ends[-1] > MAX_VALUES:
        return None
    offsets = np.zeros(len(values) + 1, np.int32)
    offsets[1:] = ends
    # Copied also where it is one array: the events may change afterwards.
    count = int(ends[-1])
    if later is not None and count * dtype.itemsize >= _LATER_FROM_BYTES:
        flat = np.empty(count, dtype)
        later.append(Fill(flat, values))
    else:
        flat = np.concatenate(values)
    array = pa.Array.from_buffers(arrow_type.value_type, count, [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(pa.array(offsets), array, type=arrow_type)


def _never_plain(_values: Sequence[Any], _: list[Fill] | None) -> None:
    return None


def _plain_text(values: Sequence[str], _: list[Fill] | None) -> pa.Array | None:
    return pa.array(values, pa.string()) if "".join(values).isascii() else None


def _plain_bytes(values: Sequence[bytes], _: list[Fill] | None) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(list(map(len, values)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)
