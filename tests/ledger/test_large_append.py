"""A large append is written while it is encoded and hashed; what is stored is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ledger import Ledger, open_ledger
from ledger.encode import events_to_table
from ledger.encode_plain import Fill
from ledger.errors import StorageFailed
from ledger.segment import Identity, PiecesToFill, serialise
from ledger.verify import verify_ledger
from tests.bench.samples import generated
from tests.ledger import factory


@pytest.fixture
def ledger(quick_path: Path) -> Iterator[Ledger]:
    with open_ledger(quick_path / "ledger", create=True) as opened:
        opened.create_run("r")
        yield opened


def test_a_large_append_is_stored_as_if_encoded_at_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Fill] = []
    real = Fill.run

    def run(fill: Fill) -> None:
        ran.append(fill)
        real(fill)

    monkeypatch.setattr(Fill, "run", run)
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    events = generated(3 << 20)
    writer.append(events)
    assert len(ran) == 2  # tokens and log-probs
    assert verify_ledger(ledger).ok
    (stored,) = (s for s in ledger.segment_infos("r") if s.kind == "segment_generated")
    table = ledger.index.open(stored)
    for name in ("tokens", "rollout_log_probs"):
        values = table.column(name).combine_chunks().values.to_numpy()
        assert (values == np.concatenate([getattr(e, name) for e in events])).all()
    # A repetition, in another process as it were, is found by its content.
    again = ledger.writer("r", producer="p", epoch=writer.epoch)
    assert again.append(events, producer_seq=1).first_seq == stored.first_seq
    assert len(ran) == 4


def test_pieces_wait_for_their_bytes_and_fail_if_they_never_come() -> None:
    later: list[Fill] = []
    events = generated(3 << 20)
    whole = serialise(events_to_table(events, recorded_at=1), Identity("r", "b", "p", 1, 0, 0))
    table = events_to_table(events, recorded_at=1, later=later)
    pieces = PiecesToFill(serialise(table, Identity("r", "b", "p", 1, 0, 0)), later)
    for fill in later:
        fill.run()
        fill.give_up()  # too late to fail
    assert b"".join(pieces) == b"".join(whole)
    later.clear()
    table = events_to_table(events, recorded_at=1, later=later)
    pieces = PiecesToFill(serialise(table, Identity("r", "b", "p", 1, 0, 0)), later)
    later[0].run()
    later[1].give_up()
    with pytest.raises(StorageFailed, match="given up"):
        b"".join(pieces)


def test_a_large_append_that_is_refused_leaves_nothing(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    events = generated(3 << 20)
    with pytest.raises(ValueError, match="published"):
        writer.append(events)
    assert list(ledger.store.list("runs/r/hot")) == []
    assert ledger.store.sweep(-1.0) == []
    writer.append([factory.weights(0, None, None)])
    assert writer.append(events).first_seq == 2
