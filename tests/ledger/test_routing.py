"""Expert ids and gate weights come back exactly, in as few bytes as fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import open_ledger
from ledger.encode import events_to_table, table_to_events
from ledger.errors import InvalidEvent
from ledger.events import RoutingRecorded
from ledger.invariants import check_rows
from ledger.routing import (
    MOST_EXPERTS,
    expert_ids_of,
    expert_weights_of,
    repeated_expert,
    routing_of,
)

SPECIAL = np.array([0x80000000, 0xFF800000, 0x7FC00001, 0x7FA00001, 1], np.uint32)
"""−0.0, −inf, a quiet and a signalling NaN with payload, the smallest number."""


def choices(rows: int, layers: int, topk: int, experts: int, seed: int) -> np.ndarray:
    """Different experts of each token and layer, in any order, the last expert among them."""
    random = np.random.default_rng(seed)
    step = random.integers(1, max(2, experts // topk), (rows, layers, 1))
    first = random.integers(0, experts, (rows, layers, 1))
    ids = (first + step * np.arange(topk)) % experts
    if ids.size:
        ids[-1, -1] = np.roll(experts - 1 - np.arange(topk), seed % topk)
    return ids


@given(
    experts=st.sampled_from([1, 2, 3, 128, 255, 256, 257, 384, 65_535, MOST_EXPERTS]),
    rows=st.integers(0, 5),
    layers=st.integers(1, 3),
    topk=st.integers(1, 8),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]),
    seed=st.integers(0, 2**31),
    with_weights=st.booleans(),
)
def test_what_is_recorded_comes_back(
    experts: int,
    rows: int,
    layers: int,
    topk: int,
    dtype: type,
    seed: int,
    with_weights: bool,
) -> None:
    topk = min(topk, experts)
    ids = choices(rows, layers, topk, experts, seed)
    if experts - 1 <= np.iinfo(dtype).max:
        ids = ids.astype(dtype)
    weights = None
    if with_weights:
        bits = np.random.default_rng(seed).integers(0, 2**32, ids.shape, np.uint32)
        bits.reshape(-1)[: len(SPECIAL)] = SPECIAL[: bits.size]
        weights = bits.view(np.float32)
    event = routing_of(ids, num_experts=experts, index=1, segment=0, weights=weights)
    size = 1 if experts <= 256 else 2
    assert len(event.expert_ids) == ids.size * size
    table = events_to_table([event])
    check_rows({"routing_recorded": table})
    (back,) = table_to_events(table)
    assert isinstance(back, RoutingRecorded)
    found = expert_ids_of(back)
    assert found.dtype.itemsize == size
    assert found.shape == ids.shape
    assert (found == ids).all()
    assert repeated_expert(found) is None
    found_weights = expert_weights_of(back)
    if weights is None:
        assert found_weights is None
    else:
        assert found_weights is not None
        assert found_weights.tobytes() == weights.tobytes()


def test_both_widths_come_back_from_files(tmp_path: Path) -> None:
    events = [
        routing_of(
            choices(4, 3, 2, experts, 0),
            num_experts=experts,
            index=experts,
            segment=0,
            weights=np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 3, 2),
        )
        for experts in (256, 257)
    ]
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="p") as writer:
            writer.append(events)
        rows = ledger.reader("r").table("routing_recorded").to_pylist()
    for event, row in zip(events, rows, strict=True):
        assert (row["dtype"], row["expert_ids"]) == (event.dtype, event.expert_ids)
        assert row["weights"] == event.weights


@pytest.mark.parametrize("experts", [1, 256, 257, MOST_EXPERTS])
def test_an_id_that_is_no_expert_is_refused(experts: int) -> None:
    for wrong in (-1, experts):
        ids = np.zeros((2, 1, 1), np.int64)
        ids[1] = wrong
        with pytest.raises(InvalidEvent, match=rf"field 'expert_ids'(?s:.*)found:    {wrong}"):
            routing_of(ids, num_experts=experts, index=1, segment=0)


@given(rows=st.integers(1, 6), layers=st.integers(1, 4), topk=st.integers(1, 5), data=st.data())
def test_equal_neighbours_are_found_where_they_are(
    rows: int, layers: int, topk: int, data: st.DataObject
) -> None:
    ids = choices(rows, layers, topk, 32, 3).astype(np.uint8)
    assert repeated_expert(ids) is None
    row, layer = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, layers - 1))
    if topk > 1:
        at = data.draw(st.integers(1, topk - 1))
        ids[row, layer, at] = ids[row, layer, at - 1]
        assert repeated_expert(ids) == (row, layer)
