"""How an event declares its columns: once, with permanent id, Arrow type, meaning and nature.

    @event("sample_scored", layout=1)
    class SampleScored(Event):
        index: int = column(1, pa.int64(), "The sample that was scored.")

The Arrow schema, the DuckDB view and the documentation derive from these declarations
(`schema.py`). A column is *content* unless it says `measurement=True`: wall-clock times, hosts,
throughput, names of runs, places of files. Measurements are chained like everything else, but the
content digest, by which two runs are compared, leaves them out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from ledger.errors import InvalidEvent, explain

__all__ = ["EVENTS", "Column", "Event", "column", "event"]

_KEY = "ledger.column"


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One declared column of an event layout."""

    name: str
    field_id: int
    """Permanent: never reused for another meaning, even after the column is retired."""
    type: pa.DataType
    doc: str
    nullable: bool
    measurement: bool
    since: int
    """The layout version that introduced it."""


def column(
    field_id: int,
    arrow_type: pa.DataType,
    doc: str,
    *,
    nullable: bool = False,
    measurement: bool = False,
    since: int = 1,
) -> Any:
    """Declare a column. A nullable one defaults to None; the others must be given."""
    metadata = {
        _KEY: {
            "field_id": field_id,
            "type": arrow_type,
            "doc": doc,
            "nullable": nullable,
            "measurement": measurement,
            "since": since,
        }
    }
    if nullable:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


_S = TypeVar("_S", bound="Event")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base of all events. Per-token fields hold one-dimensional numpy arrays, never lists."""

    KIND: ClassVar[str]
    LAYOUT: ClassVar[int]
    COLUMNS: ClassVar[tuple[Column, ...]]

    recorded_at: int | None = column(
        1000,
        pa.timestamp("us", tz="UTC"),
        "When the event was appended: microseconds since 1970-01-01 UTC. Filled in by the writer.",
        nullable=True,
        measurement=True,
    )

    if TYPE_CHECKING:
        # Type checkers cannot see which columns have defaults; the decorator makes the real one.
        def __init__(self, **columns: Any) -> None: ...

    def evolve(self: _S, **changes: Any) -> _S:
        """A copy with other values in the fields named."""
        changed: _S = dataclasses.replace(self, **changes)
        return changed


EVENTS: dict[str, type[Event]] = {}
"""Every event class by its stable name."""

_E = TypeVar("_E", bound=Event)


def event(kind: str, *, layout: int) -> Any:
    """Class decorator: a frozen, slotted, keyword-only dataclass, registered under `kind`."""

    def decorate(cls: type[_E]) -> type[_E]:
        made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)(cls)
        columns = tuple(
            Column(name=f.name, **f.metadata[_KEY])
            for f in sorted(
                dataclasses.fields(made), key=lambda f: int(f.metadata[_KEY]["field_id"])
            )
        )
        ids = [c.field_id for c in columns]
        if len(set(ids)) != len(ids):
            raise TypeError(f"event {kind!r} declares a field id twice: {ids}")
        if kind in EVENTS:
            raise TypeError(f"event {kind!r} is declared twice")
        made.KIND, made.LAYOUT, made.COLUMNS = kind, layout, columns
        made.__init__ = _saying_which(kind, columns, made.__init__)  # type: ignore[method-assign]
        EVENTS[kind] = made
        return made

    return decorate


def _saying_which(
    kind: str, columns: tuple[Column, ...], init: Callable[..., None]
) -> Callable[..., None]:
    """`init`, with an InvalidEvent of ours where a field is unknown or left out."""
    known = {column.name for column in columns}
    needed = [column.name for column in columns if not column.nullable]

    @functools.wraps(init)
    def checked(self: Event, **given: Any) -> None:
        try:
            init(self, **given)
        except TypeError as error:
            wrong = [name for name in given if name not in known]
            missing = [name for name in needed if name not in given]
            if not wrong and not missing:
                raise
            raise InvalidEvent(
                explain(
                    "an event was not made",
                    on=f"event {kind!r}, field {(wrong or missing)[0]!r}",
                    expected=f"the fields {sorted(known)}" if wrong else "a value",
                    found="a field that there is not" if wrong else "none",
                )
            ) from error

    return checked
