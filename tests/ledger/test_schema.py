"""Layouts: old ones are raised, newer ones refused, and all are documented."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from ledger import schema
from ledger.encode import events_to_table, table_to_events
from ledger.errors import IncompatibleFormat
from ledger.events import EVENTS
from ledger.fields import Event, column, event
from ledger.hashing import logical_hash, row_content_hashes


@pytest.fixture
def grown() -> Iterator[type[Event]]:
    """A kind that has grown by one column in each of two layouts."""

    @event("test_grown", layout=3)
    class Grown(Event):
        """A test."""

        a: int = column(1, pa.int64(), "First.")
        b: int | None = column(2, pa.int64(), "Second.", nullable=True, since=2)
        c: str | None = column(3, pa.string(), "Third.", nullable=True, since=3)

    yield Grown
    del EVENTS["test_grown"]
    for key in [key for key in schema.UPCASTS if key[0] == "test_grown"]:
        del schema.UPCASTS[key]


def old_table() -> pa.Table:
    return pa.table({"a": [1, 2], "recorded_at": [None, None]}).cast(
        schema.arrow_schema("test_grown", 1)
    )


def test_an_old_layout_is_raised_one_version_at_a_time(grown: type[Event]) -> None:
    calls = []

    def to_2(table: pa.Table) -> pa.Table:
        calls.append(2)
        return schema.with_null_column(table, "b", pa.int64())

    def to_3(table: pa.Table) -> pa.Table:
        calls.append(3)
        return schema.with_null_column(table, "c", pa.string())

    schema.UPCASTS[("test_grown", 1)] = to_2
    schema.UPCASTS[("test_grown", 2)] = to_3
    old = old_table()
    raised = schema.upcast(old)
    assert calls == [2, 3]
    assert raised.schema.equals(schema.arrow_schema("test_grown"), check_metadata=True)
    assert [e.a for e in table_to_events(old)] == [1, 2]  # type: ignore[attr-defined]
    # The link of an old segment stays what it was; its rows mean the same after the upcast.
    assert logical_hash(old) != logical_hash(raised)
    assert row_content_hashes(old) == row_content_hashes(raised)
    new = events_to_table([grown(a=1), grown(a=2)])  # type: ignore[call-arg]
    assert logical_hash(new) == logical_hash(raised)


@pytest.mark.usefixtures("grown")
def test_a_missing_or_wrong_upcaster_is_an_error() -> None:
    with pytest.raises(IncompatibleFormat, match="an upcaster to layout 2"):
        schema.upcast(old_table())
    schema.UPCASTS[("test_grown", 1)] = lambda table: table
    with pytest.raises(IncompatibleFormat, match="other columns"):
        schema.upcast(old_table())


@pytest.mark.usefixtures("grown")
def test_newer_layouts_and_unknown_kinds_are_refused() -> None:
    newer = old_table().replace_schema_metadata({schema.KIND: "test_grown", schema.LAYOUT: "4"})
    with pytest.raises(IncompatibleFormat, match="1 to 3"):
        schema.upcast(newer)
    with pytest.raises(IncompatibleFormat, match="not known"):
        schema.arrow_schema("no_such_event")
    with pytest.raises(IncompatibleFormat, match="does not say"):
        schema.upcast(pa.table({"a": [1]}))


def test_documentation_has_every_column() -> None:
    text = schema.documentation()
    for cls in EVENTS.values():
        assert f"### `{cls.KIND}`" in text
        for c in cls.COLUMNS:
            assert f"| {c.field_id} | `{c.name}` |" in text
            assert c.doc in text
