"""The benchmark measures what it says: both sides answer the same, and goals are told apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ledger import open_ledger
from tests.bench.__main__ import PARTS, notes_on
from tests.bench.figures import Figure
from tests.bench.mismatch import documented_query, same_answer, write_training
from tests.bench.peer_formats import PEERS
from tests.bench.samples import RUN, emptied, generated


def test_goals_are_limits_from_below_or_above() -> None:
    speed = Figure(group="g", name="fast", against="raw", ratio=0.8, goal=0.85)
    size = Figure(group="g", name="small", against="raw", ratio=0.8, goal=0.6, at_most=True)
    for figure in (speed, size):
        assert figure.met is False
        assert any(figure.name in note and "missed" in note for note in notes_on([figure], None))
    for figure in (
        dataclasses.replace(speed, ratio=0.85),
        dataclasses.replace(size, ratio=0.6),
        dataclasses.replace(speed, goal=None),
        dataclasses.replace(speed, ratio=None),
    ):
        assert figure.met is not False
        assert not any("missed" in note for note in notes_on([figure], None))
    assert dataclasses.replace(size, unit="s").shown() == "0.8 s"
    assert dataclasses.replace(size, unit="%").wanted() == "≤ 60.00%"
    assert len(set(PARTS)) == len(PARTS)


def test_the_documented_query_and_numpy_give_the_same_answer(tmp_path: Path) -> None:
    write_training(tmp_path, 2, 1 << 12, samples=24, response=40)
    query = documented_query("mismatch")
    with open_ledger(tmp_path) as ledger:
        same_answer(ledger.reader(RUN), query)
        for wrong in (
            query.replace("largest DESC", "largest ASC"),
            query.replace("LIMIT 20", "LIMIT 19"),
        ):
            assert wrong != query
            with pytest.raises((RuntimeError, ValueError)):
                same_answer(ledger.reader(RUN), wrong)


@pytest.mark.parametrize(
    "peer", [peer for peer in PEERS if peer.module == "torch"], ids=lambda peer: str(peer.name)
)
def test_peers_give_back_every_value(peer: object, tmp_path: Path) -> None:
    events = generated(1 << 15)
    values = sum(len(e.tokens) + len(e.rollout_log_probs) for e in events)
    found = next(p for p in PEERS if p is peer)
    found.write(emptied(tmp_path / "peer"), events)
    assert found.read(tmp_path / "peer") == values
