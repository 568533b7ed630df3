"""Hot segments as bytes: the pieces of a large one are what Arrow writes in one go."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ledger import segment
from ledger.encode import events_to_table
from ledger.hashing import file_hash
from tests.ledger import factory


def test_a_large_segment_has_the_bytes_of_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        factory.segment(index, np.arange(50_000, dtype=np.int32), rollout_step=0)
        for index in range(3)
    ]
    table = events_to_table(events, recorded_at=1)
    identity = segment.Identity("r", "main", "p", 1, 0, 0)
    pieces = segment.serialise(table, identity)
    assert len(pieces) > 1
    monkeypatch.setattr(segment, "_IN_PIECES_FROM_BYTES", 1 << 40)
    (whole,) = segment.serialise(table, identity)
    assert b"".join(pieces) == whole.to_pybytes()
    assert file_hash(*pieces) == file_hash(whole)
    found = segment.segment_file("folder", table.num_rows, pieces)
    assert found.size_bytes == whole.size
    assert pa.ipc.open_file(whole).read_all().equals(table)
