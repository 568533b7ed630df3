"""Canonical JSON and weight roots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ledger.canonical import canonical_json, json_digest
from ledger.errors import InvalidArgument
from ledger.weights import first_difference, tensor_record, weights_root


@dataclasses.dataclass(frozen=True)
class _Settings:
    path: Path
    rate: float
    names: tuple[str, ...]


def test_json_depends_on_the_value_only() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, True]}) == '{"a":[1.5,null,true],"b":1}'
    settings = _Settings(Path("x/y"), 1e-6, ("ä",))
    assert canonical_json(settings) == '{"names":["ä"],"path":"x/y","rate":1e-06}'
    assert canonical_json({"k": b"\x00\xff"}) == '{"k":"00ff"}'
    assert json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})
    assert json_digest({"a": 1}) != json_digest({"a": 1.5})


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {1: 2}, {1, 2}, object()])
def test_json_refuses_what_has_no_single_form(value: object) -> None:
    with pytest.raises(InvalidArgument, match="canonical JSON"):
        canonical_json(value)


def test_weights_differ_by_one_unit_in_the_last_place() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    changed = values.copy()
    changed[1, 2] = np.nextafter(changed[1, 2], np.float32(9))
    a = [tensor_record("w", "float32", (2, 3), values), tensor_record("b", "int8", (1,), b"\x01")]
    b = [tensor_record("w", "float32", (2, 3), changed), a[1]]
    assert weights_root(a) == weights_root(reversed(a))
    assert weights_root(a) != weights_root(b)
    assert first_difference(a, a) is None
    text = first_difference(a, b)
    assert text is not None
    assert text.startswith("tensor 'w'")
    assert a[0].checksum.hex() in text
    assert b[0].checksum.hex() in text
    assert "missing" in (first_difference(a, b[:1]) or "")
    assert "not expected" in (first_difference(a[:1], a) or "")
    reshaped = [tensor_record("w", "float32", (3, 2), values), a[1]]
    assert "[2, 3] expected, [3, 2] found" in (first_difference(a, reshaped) or "")
