"""Segments of every layout that was ever written are read for ever, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ledger.encode import table_to_events
from ledger.events import EVENTS
from ledger.hashing import logical_hash, row_content_hashes
from ledger.segment import HOT_FORMAT, Identity, SegmentFile, read_identity
from ledger.segment_reader import SegmentReader
from ledger.storage import LocalStore
from tests.golden.make_layout import EXPECTED, HERE, fields

GOLDEN: dict[str, Any] = json.loads(EXPECTED.read_text())


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_golden_segment_is_read(name: str) -> None:
    wanted = GOLDEN[name]
    kind, layout = name.rsplit("-", 1)
    path = f"{name}.arrow"
    size = (HERE / path).stat().st_size
    file = SegmentFile(path, HOT_FORMAT, 0, 3, bytes.fromhex(wanted["file_hash"]), size)
    table = SegmentReader(LocalStore(HERE)).open(file, kind, int(layout))
    assert read_identity(table) == Identity("golden", "main", "make_layout", 1, 0, 0)
    assert logical_hash(table).hex() == wanted["logical_hash"]
    assert [h.hex() for h in row_content_hashes(table)] == wanted["row_content_hashes"]
    found = [fields(event) for event in table_to_events(table)]
    for have, want in zip(found, wanted["events"], strict=True):
        # Later layouts add columns; they are null in rows of an older one.
        assert {name: have[name] for name in want} == want
        assert all(have[name] is None for name in have.keys() - want.keys())


def test_every_layout_has_a_golden_segment() -> None:
    wanted = {f"{kind}-{n}" for kind, cls in EVENTS.items() for n in range(1, cls.LAYOUT + 1)}
    assert wanted == GOLDEN.keys(), "run python -m tests.golden.make_layout, and keep its files"
