"""Events to Arrow and back: exact, and strict."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from ledger.encode import events_to_table, table_to_events
from ledger.errors import InvalidEvent
from ledger.fields import Event
from ledger.schema import FIELD_ID, KIND, LAYOUT
from tests.ledger import factory
from tests.ledger.strategies import event_bits, tables_of_events


@settings(max_examples=80, deadline=None)
@given(tables_of_events())
def test_every_event_comes_back_with_all_its_bits(events: list[Event]) -> None:
    table = events_to_table(events)
    table.validate(full=True)
    back = table_to_events(table)
    assert [event_bits(e) for e in back] == [event_bits(e) for e in events]
    sliced = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert [event_bits(e) for e in table_to_events(sliced)] == [event_bits(e) for e in events]


def test_special_floats_keep_their_bits() -> None:
    raw = np.array([0x80000000, 0xFF800000, 0x7FC00001, 0x7FA00000, 1, 0x3F800000], np.uint32)
    log_probs = raw.view(np.float32)
    event = factory.segment(0, factory.ints(*range(6)), rollout_step=0, log_probs=log_probs)
    event = dataclasses.replace(event, rollout_log_probs=log_probs)
    (back,) = table_to_events(events_to_table([event]))
    assert back.rollout_log_probs.view(np.uint32).tolist() == raw.tolist()  # type: ignore[attr-defined]


def test_arrays_come_back_as_views_and_schema_names_the_fields() -> None:
    table = events_to_table([factory.segment(0, factory.ints(5, 6), rollout_step=0)])
    (back,) = table_to_events(table)
    assert not back.tokens.flags.writeable  # type: ignore[attr-defined]
    assert table.schema.metadata == {KIND: b"segment_generated", LAYOUT: b"3"}
    assert table.schema.field("tokens").metadata == {FIELD_ID: b"8"}
    assert not table.schema.field("tokens").nullable


def test_the_writers_time_fills_only_what_is_open() -> None:
    events = [factory.score(0, 1.0), dataclasses.replace(factory.score(1, 1.0), recorded_at=7)]
    times = events_to_table(events, recorded_at=9).column("recorded_at").cast(pa.int64())
    assert times.to_pylist() == [9, 7]


def test_integers_of_another_width_are_taken_where_they_fit() -> None:
    event = factory.segment(0, np.array([1, 2**31 - 1], np.int64), rollout_step=0)
    (back,) = table_to_events(events_to_table([event]))
    assert back.tokens.dtype == np.int32  # type: ignore[attr-defined]


GOOD = factory.segment(0, factory.ints(5, 6), rollout_step=0)


@pytest.mark.parametrize(
    ("field", "value", "expected", "found"),
    [
        ("tokens", None, "never null", "null"),
        ("tokens", [5, 6], "a 1-D numpy array of int32", "list"),
        ("tokens", np.array([[5, 6]]), "1-D", "(1, 2)"),
        ("tokens", np.array([5.0, 6.0]), "int32", "float64"),
        ("tokens", np.array([5, 2**31]), "values from -2147483648", "2147483648"),
        ("tokens", np.array([True, False]), "int32", "bool"),
        ("rollout_log_probs", np.array([-0.5, -0.5]), "float32", "float64"),
        ("rollout_log_probs", np.array([-1, -1], np.int32), "float32", "int32"),
        ("index", None, "never null", "null"),
        ("index", 1.0, "an integer", "float 1.0"),
        ("index", True, "an integer", "bool True"),
        ("index", 2**63, "an integer from", str(2**63)),
        ("segment", 2**31, "an integer from", str(2**31)),
        ("temperature", "1.0", "a float", "str '1.0'"),
        ("temperature", np.float32(1), "a float", "float32"),
        ("engine", b"x", "text", "bytes"),
        ("engine", "\ud800", "UTF-8", "str"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    field: str, value: Any, expected: str, found: str
) -> None:
    bad = dataclasses.replace(GOOD, **{field: value})
    with pytest.raises(InvalidEvent) as caught:
        events_to_table([GOOD, bad])
    text = str(caught.value)
    assert f"event 'segment_generated', row 1, field '{field}'" in text
    _, want, have = text.splitlines()[:3]
    assert expected in want
    assert found in have


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (dataclasses.replace(factory.weights(0, None, None), root=b"short"), "root"),
        (dataclasses.replace(factory.weights(0, None, None), tensor_names="ab"), "tensor_names"),
        (
            dataclasses.replace(factory.weights(0, None, None), tensor_names=["a", None]),
            "tensor_names",
        ),
        (dataclasses.replace(factory.weights(0, None, None), tensor_shapes=[(2, 3)]), "tensor_sh"),
        (dataclasses.replace(factory.started(), deterministic=1), "deterministic"),
    ],
)
def test_other_columns_are_as_strict(event: Event, field: str) -> None:
    with pytest.raises(InvalidEvent, match=f"row 0, field '{field}"):
        events_to_table([event])


def test_a_misspelt_field_and_a_mixture_are_refused() -> None:
    with pytest.raises(InvalidEvent, match="tokenz"):
        dataclasses.replace(GOOD, tokenz=1)
    with pytest.raises(InvalidEvent, match="row 1"):
        events_to_table([GOOD, factory.score(0, 1.0)])
