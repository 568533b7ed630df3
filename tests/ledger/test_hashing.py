"""The logical hash sees values, and nothing else; content hashes leave measurements out."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.encode import events_to_table
from ledger.fields import Event
from ledger.hashing import chain_link, logical_hash, multiset_digest, row_content_hashes
from ledger.schema import arrow_schema
from tests.ledger import factory
from tests.ledger.strategies import event_bits, tables_of_events


def through_parquet(table: pa.Table, **options: Any) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    sink.seek(0)
    return pq.read_table(sink)


def through_ipc(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return pa.ipc.open_file(sink.getvalue()).read_all()


@settings(max_examples=60, deadline=None)
@given(tables_of_events(), st.integers(0, 5))
def test_the_hash_does_not_depend_on_how_rows_are_stored(events: list[Event], cut: int) -> None:
    table = events_to_table(events)
    wanted = logical_hash(table)
    assert logical_hash(through_ipc(table)) == wanted
    assert logical_hash(pa.concat_tables([table.slice(0, cut), table.slice(cut)])) == wanted
    padded = pa.concat_tables([table, table, table]).combine_chunks()
    assert logical_hash(padded.slice(len(events), len(events))) == wanted
    assert logical_hash(through_parquet(table)) == wanted
    assert logical_hash(through_parquet(table, use_dictionary=False, compression="zstd")) == wanted
    rows = row_content_hashes(table)
    assert row_content_hashes(through_parquet(table)) == rows
    assert row_content_hashes(padded.slice(len(events))) == rows + rows
    if rows:
        assert rows == [row_content_hashes(events_to_table([e]))[0] for e in events]


@settings(max_examples=60, deadline=None)
@given(tables_of_events())
def test_the_hash_tells_different_rows_apart(events: list[Event]) -> None:
    first, *rest = events
    for other in rest:
        same = event_bits(first) == event_bits(other)
        left, right = (logical_hash(events_to_table([e])) for e in (first, other))
        assert (left == right) == same


def test_bytes_under_a_null_do_not_show() -> None:
    table = events_to_table([factory.signal(0, 0, np.ones(2), np.zeros(2, np.float32))] * 2)
    offsets = pa.array([0, 1, 3], pa.int32())
    hidden = pa.ListArray.from_arrays(
        offsets, pa.array([1, 2, 3], pa.float32()), mask=pa.array([True, True])
    )
    at = table.schema.get_field_index("values")
    other = table.set_column(at, table.schema.field("values"), hidden)
    assert other.column("values").null_count == 2
    assert logical_hash(other) == logical_hash(table)
    numbers = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x00"), pa.py_buffer(np.array([5, 6]).tobytes())]
    )
    weights = events_to_table([factory.checkpoint(0, None)] * 2)
    at = weights.schema.get_field_index("step")
    other = weights.set_column(at, weights.schema.field("step"), numbers)
    assert logical_hash(other) == logical_hash(weights)


def test_a_mask_that_comes_back_as_booleans_is_the_same() -> None:
    table = events_to_table([factory.signal(0, 0, np.array([1, 0, 1]), np.zeros(3, np.float32))])
    at = table.schema.get_field_index("loss_mask")
    sealed = table.set_column(at, "loss_mask", table.column("loss_mask").cast(pa.list_(pa.bool_())))
    assert sealed.schema.field("loss_mask").type == pa.list_(pa.bool_())
    assert logical_hash(sealed) == logical_hash(table)
    assert row_content_hashes(sealed) == row_content_hashes(table)


def test_null_empty_and_shifted_values_differ() -> None:
    def signal(values: Any) -> Event:
        made = factory.signal(0, 0, np.ones(0), np.zeros(0, np.float32))
        return dataclasses.replace(made, values=values)

    empty = np.empty(0, np.float32)
    tables = [events_to_table([signal(None)]), events_to_table([signal(empty)])]
    assert logical_hash(tables[0]) != logical_hash(tables[1])
    assert row_content_hashes(tables[0]) != row_content_hashes(tables[1])
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)
    left = events_to_table([signal(one), signal(two)])
    right = events_to_table([signal(two), signal(one)])
    assert logical_hash(left) != logical_hash(right)
    zero, negative = signal(np.array([0.0], np.float32)), signal(np.array([-0.0], np.float32))
    assert logical_hash(events_to_table([zero])) != logical_hash(events_to_table([negative]))


def test_measurements_are_hashed_but_are_no_content() -> None:
    event = factory.segment(0, factory.ints(5, 6), rollout_step=0)
    slower = dataclasses.replace(event, generation_time_s=9.0, recorded_at=5)
    left, right = events_to_table([event]), events_to_table([slower])
    assert logical_hash(left) != logical_hash(right)
    assert row_content_hashes(left) == row_content_hashes(right)
    other = dataclasses.replace(event, sampling_seed=0)
    assert row_content_hashes(events_to_table([other])) != row_content_hashes(left)


def test_kinds_without_content_contribute_nothing() -> None:
    empty = arrow_schema("run_resumed").empty_table()
    assert row_content_hashes(empty) == []
    assert multiset_digest({"run_resumed": []}) == multiset_digest({})
    a, b = b"a" * 32, b"b" * 32
    assert multiset_digest({"x": [a, b]}) == multiset_digest({"x": [b, a]})
    assert multiset_digest({"x": [a]}) != multiset_digest({"x": [a, a]})
    assert multiset_digest({"x": [a], "y": [b]}) != multiset_digest({"x": [b], "y": [a]})


def test_every_part_of_a_link_counts() -> None:
    base: list[Any] = [bytes(32), 1, "kind", 2, b"h" * 32, "key"]
    links = {chain_link(*base)}
    for at, other in enumerate([b"\x01" * 32, 2, "kinds", 3, b"g" * 32, "keys"]):
        links.add(chain_link(*base[:at], other, *base[at + 1 :]))
    assert len(links) == 7


def test_the_hash_of_a_known_table_never_changes() -> None:
    event = factory.segment(0, factory.ints(5, 6), rollout_step=0)
    table = events_to_table([dataclasses.replace(event, recorded_at=1)])
    for layout, pinned in PINNED_LOGICAL.items():
        schema = arrow_schema("segment_generated", layout)
        as_then = table.select(schema.names).cast(schema).replace_schema_metadata(schema.metadata)
        assert logical_hash(as_then).hex() == pinned
        # Columns that came later and are NULL change no row.
        assert row_content_hashes(as_then)[0].hex() == PINNED_ROW
    assert logical_hash(table).hex() == PINNED_LOGICAL[3]
    assert chain_link(bytes(32), 1, "k", 2, b"h" * 32, "key").hex() == PINNED_LINK


# A change of any of these makes every ledger that was ever written fail to verify.
PINNED_LOGICAL = {  # by layout
    1: "a7060de83a7f9e135f8cda860409139768484cbb35cc3852c7755789ad16d29e",
    2: "51cc0f3d4fbf60b3ba97b00cc2e0251fb2042d38ae3bfea3b9898bf32aec221d",
    3: "eecb9e008c164f177ce99c688d0106d73b9fdb5f2535ab052ada783fe6744c52",
}
PINNED_ROW = "caa61ff72bd1e060dec65afb3ab53b8a39e2c34543cb711d33e350d42376371d"
PINNED_LINK = "5dd4aaf84321c4b9e062898636a03cb2d87ecb783164f09a1453d69ea9cc87dc"
