"""Keys of appends are what they seem: nothing is stored under another one than it is chained by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.places import AnyPlace

NAMES: list[Any] = ["", None, 5, b"p", "\ud800", "a\0b"]
NUMBERS: list[Any] = [-1, 2**63, 2**70, 1.0, 1.5, True, "1", b"1", np.float64(2)]


def test_no_key_is_stored_as_another_one(any_place: AnyPlace) -> None:
    with any_place.open(create=True) as ledger:
        ledger.create_run("run")
        for name in NAMES:
            with pytest.raises(InvalidArgument, match="no name that can be stored"):
                ledger.writer("run", producer=name)
        writer = ledger.writer("run", producer="Ä/../%~\n")
        for number in NUMBERS:
            with pytest.raises(InvalidArgument, match="producer_seq"):
                writer.append([factory.score(0, 1.0)], producer_seq=number)
            with pytest.raises(InvalidArgument, match="epoch"):
                ledger.writer("run", producer=writer.producer, epoch=number)
        receipt = writer.append([factory.score(0, 1.0)], producer_seq=np.int64(3))
        again = ledger.writer("run", producer=writer.producer, epoch=np.int32(1))
        assert again.append([factory.score(0, 1.0)], producer_seq=3) == receipt
        assert writer.append([factory.score(1, 1.0)], producer_seq=2**63 - 1).first_seq == 2
        assert ledger.run().head_seq == 2
        assert verify_ledger(ledger).ok
