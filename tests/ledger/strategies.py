"""Hypothesis strategies: any event that its layout allows, invariants aside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from ledger.events import EVENTS
from ledger.fields import Event


def values(arrow_type: pa.DataType) -> st.SearchStrategy[Any]:
    """Values that a field of this type takes; floats with any bits at all."""
    if pa.types.is_list(arrow_type):
        inner = arrow_type.value_type
        if pa.types.is_integer(inner) or pa.types.is_floating(inner):
            dtype = np.dtype(inner.to_pandas_dtype())
            return st.integers(0, 4).flatmap(
                lambda n: st.binary(min_size=n * dtype.itemsize, max_size=n * dtype.itemsize).map(
                    lambda raw: np.frombuffer(raw, dtype)
                )
            )
        return st.lists(values(inner), max_size=3)
    if pa.types.is_boolean(arrow_type):
        return st.booleans()
    if pa.types.is_timestamp(arrow_type):
        return st.integers(-(2**63) + 1, 2**63 - 1)
    if pa.types.is_integer(arrow_type):
        limits = np.iinfo(arrow_type.to_pandas_dtype())
        return st.integers(int(limits.min), int(limits.max))
    if pa.types.is_floating(arrow_type):
        return st.binary(min_size=8, max_size=8).map(lambda raw: float(np.frombuffer(raw)[0]))
    if pa.types.is_string(arrow_type):
        return st.text(max_size=6)
    if pa.types.is_fixed_size_binary(arrow_type):
        return st.binary(min_size=arrow_type.byte_width, max_size=arrow_type.byte_width)
    return st.binary(max_size=9)


def events(kind: str) -> st.SearchStrategy[Event]:
    """Events of one kind."""
    cls = EVENTS[kind]
    fields = {
        c.name: st.none() | values(c.type) if c.nullable else values(c.type) for c in cls.COLUMNS
    }
    return st.builds(cls, **fields)


def tables_of_events() -> st.SearchStrategy[list[Event]]:
    """Some events of one kind, whichever."""
    return st.sampled_from(sorted(EVENTS)).flatmap(
        lambda kind: st.lists(events(kind), min_size=1, max_size=5)
    )


def bits(value: Any) -> Any:
    """A value in a form in which equality means equality of all bits."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def event_bits(event: Event) -> dict[str, Any]:
    """All fields of an event, by bits."""
    return {c.name: bits(getattr(event, c.name)) for c in event.COLUMNS}
