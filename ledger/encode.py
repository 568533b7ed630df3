"""Events to Arrow and back, strictly: what does not fit its declared column is refused, not mended.

Per-token fields go from numpy to Arrow buffers and back as whole arrays; no token ever becomes a
Python object. Floats keep all their bits: NaN payloads, −0.0, infinities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledger.encode_plain import MAX_VALUES, PLAIN_TYPES, Fill, fields_of, plain_encoders
from ledger.errors import InvalidEvent, explain
from ledger.fields import Column, Event
from ledger.schema import (
    arrow_schema,
    columns_of,
    event_class,
    table_kind,
    table_layout,
    type_name,
    upcast,
)

__all__ = ["events_of", "events_to_table", "refuse", "require_layout", "table_to_events"]


def refuse(kind: str, row: int, field: str, expected: object, found: object) -> NoReturn:
    """Raise the InvalidEvent that names event, row and field, and what disagrees."""
    raise InvalidEvent(
        explain(
            "an event was refused, and nothing of its append was stored",
            on=f"event {kind!r}, row {row}, field {field!r}",
            expected=expected,
            found=found,
        )
    )


def events_to_table(
    events: Sequence[Event], *, recorded_at: int | None = None, later: list[Fill] | None = None
) -> pa.Table:
    """One table, in the layout's schema and the order given, of events of one kind.

    `recorded_at` (microseconds since 1970-01-01 UTC) fills that field where it is open. With
    `later`, large columns of numbers have their place but not their values yet: what it is given is
    to be run before anybody looks at them.

    Raises:
        InvalidEvent: null in a non-null column, a wrong type or dtype, a value out of range, events
            of different kinds. Integer arrays of another width are taken where all values fit;
            float arrays must have exactly the declared dtype.
    """
    if not events:
        raise InvalidEvent(explain("no events to encode", expected="at least one", found=0))
    cls: Any = type(events[0])
    for row, item in enumerate(events):
        if type(item) is not cls:
            refuse(cls.KIND, row, "(event)", f"a {cls.__name__}", _describe(item))
    columns = list(zip(*map(fields_of(cls), events), strict=True))
    arrays = []
    for column, plain, values in zip(cls.COLUMNS, plain_encoders(cls), columns, strict=True):
        if column.name == "recorded_at" and recorded_at is not None:
            values = tuple(recorded_at if value is None else value for value in values)
        # Types first, all at once: nearly always they are the right ones, and no value needs a
        # look.
        types = set(map(type, values))
        array = plain(values, later) if len(types) == 1 and types <= PLAIN_TYPES else None
        arrays.append(_encode(cls.KIND, column, values, types) if array is None else array)
    return pa.Table.from_arrays(arrays, schema=arrow_schema(cls.KIND))


def require_layout(tables: Mapping[str, pa.Table]) -> None:
    """Refuse tables that are not as `events_to_table` makes them: a check of what others made.

    Arrow by itself takes nulls in non-null columns, and drops misspelt keys.

    Raises:
        InvalidEvent: naming kind, row, field, expected and found.
    """
    for kind, table in tables.items():
        try:
            schema = arrow_schema(kind, table_layout(table))
        except (LookupError, TypeError, ValueError) as error:
            refuse(kind, 0, "(table)", "a table of a known event and layout", repr(error))
        for name in table.column_names:
            if name not in schema.names:
                refuse(kind, 0, name, f"one of {schema.names}", "a field that there is not")
        for field in schema:
            if field.name not in table.column_names:
                refuse(kind, 0, field.name, type_name(field.type), "no such column")
            column = table.column(field.name)
            if type_name(column.type) != type_name(field.type):
                found = type_name(column.type)
                refuse(kind, 0, field.name, type_name(field.type), found)
            if column.null_count and not field.nullable:
                row = pc.index(column.is_null(), True).as_py()
                refuse(kind, row, field.name, f"{type_name(field.type)}, never null", "null")
        if table.column_names != schema.names:
            refuse(kind, 0, "(table)", f"columns in the order {schema.names}", table.column_names)


def _encode(kind: str, column: Column, values: Sequence[Any], types: set[type]) -> pa.Array:
    nulls = np.fromiter((value is None for value in values), bool, len(values))
    if not column.nullable and nulls.any():
        row = int(nulls.argmax())
        refuse(kind, row, column.name, f"{type_name(column.type)}, never null", "null")
    arrow_type = column.type
    if len(types) == 1 and nulls.all():
        return pa.nulls(len(values), arrow_type)
    if pa.types.is_list(arrow_type):
        return _encode_list(kind, column, values, nulls)
    check, dtype = _scalar_check(arrow_type)
    for row, value in enumerate(values):
        if value is not None and (problem := check(value)):
            refuse(kind, row, column.name, problem, _describe(value))
    if dtype is None:
        return pa.array(values, arrow_type)
    if nulls.any():
        values = [0 if value is None else value for value in values]
    raw = np.array(values, dtype)
    return pa.array(raw, arrow_type, mask=nulls if nulls.any() else None)


def _encode_list(kind: str, column: Column, values: Sequence[Any], nulls: np.ndarray) -> pa.Array:
    value_type = column.type.value_type
    if pa.types.is_list(value_type):
        inner_type: np.dtype[Any] = np.dtype(value_type.value_type.to_pandas_dtype())
        flat_parts: list[np.ndarray] = []
        counts = np.zeros(len(values), np.int64)
        for row, value in enumerate(values):
            if value is None:
                continue
            _require_sequence(kind, row, column, value, f"arrays of {inner_type}")
            counts[row] = len(value)
            flat_parts += [_fit(kind, row, column, item, inner_type) for item in value]
        lengths = np.fromiter((len(p) for p in flat_parts), np.int64, len(flat_parts))
        inner = pa.ListArray.from_arrays(
            _offsets(kind, column, lengths), pa.array(_join(flat_parts, inner_type)), value_type
        )
        return _list_array(kind, column, counts, inner, nulls)
    if not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type)):
        check, _ = _scalar_check(value_type)
        for row, value in enumerate(values):
            if value is None:
                continue
            _require_sequence(kind, row, column, value, type_name(value_type))
            for item in value:
                problem = "no null in a list" if item is None else check(item)
                if problem:
                    refuse(kind, row, column.name, problem, _describe(item))
        return pa.array(values, column.type)
    dtype = np.dtype(value_type.to_pandas_dtype())
    parts = [
        np.empty(0, dtype) if value is None else _fit(kind, row, column, value, dtype)
        for row, value in enumerate(values)
    ]
    lengths = np.fromiter((len(p) for p in parts), np.int64, len(parts))
    return _list_array(kind, column, lengths, pa.array(_join(parts, dtype), value_type), nulls)


def _list_array(
    kind: str, column: Column, lengths: np.ndarray, flat: pa.Array, nulls: np.ndarray
) -> pa.Array:
    return pa.ListArray.from_arrays(
        _offsets(kind, column, lengths),
        flat,
        type=column.type,
        mask=pa.array(nulls) if nulls.any() else None,
    )


def _offsets(kind: str, column: Column, lengths: np.ndarray) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > MAX_VALUES:
        refuse(kind, 0, column.name, f"at most {MAX_VALUES} values in one append", int(offsets[-1]))
    return pa.array(offsets.astype(np.int32))


def _join(parts: list[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _fit(kind: str, row: int, column: Column, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """`value` as a 1-D array of `dtype`, if it is one or holds integers that all fit."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        array: np.ndarray = value
        if array.dtype == dtype:
            return array
        fits = dtype.kind != "f" and value.dtype.kind in "iu"
    else:
        fits = False
    if not fits:
        refuse(kind, row, column.name, f"a 1-D numpy array of {dtype}", _describe(value))
    limits = np.iinfo(dtype)
    if len(value):
        for found in (int(value.min()), int(value.max())):
            if not limits.min <= found <= limits.max:
                refuse(kind, row, column.name, f"values from {limits.min} to {limits.max}", found)
    fitted: np.ndarray = value.astype(dtype)
    return fitted


def _require_sequence(kind: str, row: int, column: Column, value: Any, of: str) -> None:
    if not isinstance(value, list | tuple):
        refuse(kind, row, column.name, f"a list of {of}", _describe(value))


_Check = Callable[[Any], str | None]


@functools.cache
def _scalar_check(arrow_type: pa.DataType) -> tuple[_Check, np.dtype[Any] | None]:
    """A function that says what a value should be, if it is not, and the column's numpy dtype."""
    if pa.types.is_boolean(arrow_type):
        return (lambda v: None if isinstance(v, bool | np.bool_) else "a bool"), np.dtype(bool)
    if pa.types.is_timestamp(arrow_type):
        return _integer_check(np.dtype(np.int64)), np.dtype(np.int64)
    if pa.types.is_integer(arrow_type):
        dtype = np.dtype(arrow_type.to_pandas_dtype())
        return _integer_check(dtype), dtype
    if pa.types.is_float64(arrow_type):
        return _check_float, np.dtype(np.float64)
    if pa.types.is_string(arrow_type):
        return _check_text, None
    if pa.types.is_fixed_size_binary(arrow_type):
        width = arrow_type.byte_width
        text = f"bytes of length {width}"
        return (lambda v: None if isinstance(v, bytes) and len(v) == width else text), None
    if pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type):
        return (lambda v: None if isinstance(v, bytes) else "bytes"), None
    raise TypeError(f"no encoding for the Arrow type {arrow_type}")


def _integer_check(dtype: np.dtype[Any]) -> _Check:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)

    def check(value: Any) -> str | None:
        if type(value) is int or isinstance(value, np.integer):
            return None if low <= value <= high else f"an integer from {low} to {high}"
        return f"an integer ({dtype})"

    return check


def _check_float(value: Any) -> str | None:
    if isinstance(value, float):
        return None
    # A Python int is a valid float to type checkers; it is taken where nothing is lost.
    if type(value) is int and abs(value) <= 2**53:
        return None
    return "a float"


def _check_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return "text"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return "text that UTF-8 can hold (no lone surrogates)"
    return None


def _describe(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype} with shape {value.shape}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '…'}"


_E = TypeVar("_E", bound=Event)


def events_of(table: pa.Table, cls: type[_E]) -> list[_E]:
    """As `table_to_events`, of a table that holds events of `cls`.

    Raises InvalidEvent where it holds another kind.
    """
    if table_kind(table) != cls.KIND:
        refuse(table_kind(table), 0, "(event)", f"a table of {cls.KIND!r}", "another kind")
    return cast(list[_E], table_to_events(table))


def table_to_events(table: pa.Table) -> list[Event]:
    """The events of a table, in its order; columns that are no field of the event are left out.

    Per-token fields are read-only views on the table's memory. Older layouts are upcast.
    """
    table = upcast(table)
    kind = table_kind(table)
    cls = event_class(kind)
    columns = columns_of(kind)
    decoded = [_decode(table.column(c.name), c.type) for c in columns]
    names = [c.name for c in columns]
    return [cls(**dict(zip(names, row, strict=True))) for row in zip(*decoded, strict=True)]


def _decode(column: pa.ChunkedArray, declared: pa.DataType) -> list[Any]:
    return [value for chunk in column.chunks for value in _decode_array(chunk, declared)]


def _decode_array(array: pa.Array, declared: pa.DataType) -> list[Any]:
    if pa.types.is_timestamp(declared):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if not pa.types.is_list(declared):
        return array.cast(declared).to_pylist()  # type: ignore[no-any-return]
    value_type = declared.value_type
    if type_name(array.type) != type_name(declared):
        array = array.cast(declared)
    if pa.types.is_list(value_type):
        inner = _decode_array(array.values, value_type)
    elif pa.types.is_integer(value_type) or pa.types.is_floating(value_type):
        inner = array.values.to_numpy(zero_copy_only=True)
    else:
        return array.to_pylist()  # type: ignore[no-any-return]
    offsets = array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [inner[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(array))]
