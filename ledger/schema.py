"""What derives from the declarations of events: Arrow schemas, documentation, upcasting.

A segment is written in one *layout* of its kind. Fields are only ever added, so layout n has the
columns with `since <= n`. An older layout is raised to the present one by upcasters, one version at
a time; a newer one is refused.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa

from ledger.errors import IncompatibleFormat, InvalidArgument, explain
from ledger.events import EVENTS
from ledger.fields import Column, Event

__all__ = [
    "FIELD_ID",
    "KIND",
    "LAYOUT",
    "UPCASTS",
    "arrow_schema",
    "columns_of",
    "documentation",
    "event_class",
    "require_kinds",
    "table_kind",
    "table_layout",
    "type_name",
    "upcast",
    "with_null_column",
    "with_null_columns",
]

KIND = b"ledger.event"
LAYOUT = b"ledger.layout"
FIELD_ID = b"ledger.field_id"

Upcaster = Callable[[pa.Table], pa.Table]


def with_null_columns(table: pa.Table) -> pa.Table:
    """The upcaster of a layout whose successor only adds nullable columns: they are all NULL."""
    kind, layout = table_kind(table), table_layout(table)
    cls: Any = event_class(kind, layout)
    for c in _columns(cls, layout + 1):
        if c.since == layout + 1:
            table = with_null_column(table, c.name, c.type)
    return table


UPCASTS: dict[tuple[str, int], Upcaster] = {
    ("branch_forked", 1): with_null_columns,
    ("eval_scored", 1): with_null_columns,
    ("prompt_issued", 1): with_null_columns,
    ("routing_recorded", 1): with_null_columns,
    ("sample_decided", 1): with_null_columns,
    ("segment_generated", 1): with_null_columns,
    ("segment_generated", 2): with_null_columns,
    ("signal_recorded", 1): with_null_columns,
    ("step_committed", 1): with_null_columns,
}
"""(kind, n) → function that raises a table of layout n to n + 1."""


def require_kinds(kinds: Collection[str] | None) -> None:
    """Raise InvalidArgument where somebody asks for a kind of event that there is not."""
    for kind in kinds or ():
        if kind not in EVENTS:
            near = difflib.get_close_matches(kind, EVENTS, n=1)
            raise InvalidArgument(
                explain(
                    "an event kind is not known",
                    on="--kind (in Python: kinds)",
                    expected=f"one of {', '.join(sorted(EVENTS))}",
                    found=repr(kind),
                    do=f"did you mean {near[0]}?" if near else None,
                )
            )


def event_class(kind: str, layout: int | None = None) -> type[Event]:
    """The class registered under `kind`.

    Raises:
        IncompatibleFormat: the kind, or the layout, is not known: a newer version wrote it.
    """
    found = EVENTS.get(kind)
    if found is None:
        raise IncompatibleFormat(
            explain(
                "an event kind is not known",
                expected=f"one of {sorted(EVENTS)}",
                found=repr(kind),
                do="read this ledger with the version that wrote it, or a newer one",
            )
        )
    if layout is not None and not 1 <= layout <= found.LAYOUT:
        raise IncompatibleFormat(
            explain(
                "a layout is not known",
                on=kind,
                expected=f"1 to {found.LAYOUT}",
                found=layout,
                do="read this ledger with the version that wrote it, or a newer one",
            )
        )
    return found


def columns_of(kind: str, layout: int | None = None) -> tuple[Column, ...]:
    """The columns of a layout (the present one by default), in the order of their ids."""
    cls: Any = event_class(kind, layout)
    return _columns(cls, cls.LAYOUT if layout is None else layout)


def arrow_schema(kind: str, layout: int | None = None) -> pa.Schema:
    """The Arrow schema of a layout; metadata carries kind, layout, and the id of each field."""
    cls: Any = event_class(kind, layout)
    return _schema(cls, cls.LAYOUT if layout is None else layout)


@functools.cache
def _columns(cls: Any, layout: int) -> tuple[Column, ...]:
    return tuple(c for c in cls.COLUMNS if c.since <= layout)


@functools.cache
def _schema(cls: Any, layout: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field(c.name, c.type, nullable=c.nullable, metadata={FIELD_ID: str(c.field_id)})
            for c in _columns(cls, layout)
        ],
        metadata={KIND: cls.KIND, LAYOUT: str(layout)},
    )


def table_kind(table: pa.Table) -> str:
    """The event kind that a table's schema metadata names."""
    return _metadata(table, KIND)


def table_layout(table: pa.Table) -> int:
    """The layout version that a table's schema metadata names."""
    return int(_metadata(table, LAYOUT))


def _metadata(table: pa.Table, key: bytes) -> str:
    value = (table.schema.metadata or {}).get(key)
    if value is None:
        raise IncompatibleFormat(
            explain(
                "a table does not say what it holds",
                expected=f"schema metadata {key.decode()!r}",
                found=sorted(k.decode() for k in table.schema.metadata or {}),
            )
        )
    return str(value.decode())


def upcast(table: pa.Table) -> pa.Table:
    """The same rows in the present layout of their kind.

    Raises:
        IncompatibleFormat: the layout is newer than this version knows, or an upcaster is missing
            or does not give the columns of the next layout.
    """
    kind, layout = table_kind(table), table_layout(table)
    newest = event_class(kind, layout).LAYOUT
    while layout < newest:
        step = UPCASTS.get((kind, layout))
        if step is None:
            raise IncompatibleFormat(
                explain(
                    "an old layout cannot be raised",
                    on=f"{kind}, layout {layout}",
                    expected=f"an upcaster to layout {layout + 1}",
                    found=f"upcasters for {sorted(UPCASTS)}",
                )
            )
        layout += 1
        schema = arrow_schema(kind, layout)
        raised = step(table)
        if set(raised.column_names) != set(schema.names):
            raise IncompatibleFormat(
                explain(
                    "an upcaster gave other columns than its layout has",
                    on=f"{kind}, layout {layout}",
                    expected=schema.names,
                    found=raised.column_names,
                )
            )
        table = raised.select(schema.names).cast(schema)
    return table


def with_null_column(table: pa.Table, name: str, arrow_type: pa.DataType) -> pa.Table:
    """For upcasters: the table with one more column, all NULL."""
    return table.append_column(
        pa.field(name, arrow_type, nullable=True), pa.nulls(table.num_rows, arrow_type)
    )


@functools.cache
def type_name(arrow_type: pa.DataType) -> str:
    """A name of an Arrow type that no version of Arrow spells differently: 'list<float32>'."""
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return f"list<{type_name(arrow_type.value_type)}>"
    if pa.types.is_fixed_size_binary(arrow_type):
        return f"binary[{arrow_type.byte_width}]"
    if pa.types.is_timestamp(arrow_type):
        return f"timestamp[{arrow_type.unit},{arrow_type.tz}]"
    for name, is_type in _PLAIN.items():
        if is_type(arrow_type):
            return name
    raise TypeError(f"no stable name for the Arrow type {arrow_type}")


_PLAIN: dict[str, Callable[[pa.DataType], bool]] = {
    "bool": pa.types.is_boolean,
    "uint8": pa.types.is_uint8,
    "int32": pa.types.is_int32,
    "int64": pa.types.is_int64,
    "float32": pa.types.is_float32,
    "float64": pa.types.is_float64,
    "string": pa.types.is_string,
    "large_binary": pa.types.is_large_binary,
    "binary": pa.types.is_binary,
}


def documentation() -> str:
    """Markdown: every event with its columns, from the declarations."""
    parts: list[str] = []
    for kind in sorted(EVENTS):
        cls = EVENTS[kind]
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        parts += [f"### `{kind}` (layout {cls.LAYOUT})", "", summary, ""]
        parts += ["| id | column | type | NULL | digest | meaning |", "|---|---|---|---|---|---|"]
        parts += [
            f"| {c.field_id} | `{c.name}` | `{type_name(c.type)}` | {'yes' if c.nullable else ''} "
            f"| {'measurement' if c.measurement else 'content'} | {c.doc} |"
            for c in cls.COLUMNS
        ]
        parts.append("")
    return "\n".join(parts)
