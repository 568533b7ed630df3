"""Writes the golden files of a layout: one small segment for each event kind, with what it holds.

    python -m tests.golden.make_layout

Files are written once and kept for ever: what is there already is never written again, so only new
kinds and new layouts get a file. `expected.json` says what each must give, by bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ledger.encode import events_to_table
from ledger.events import EVENTS
from ledger.fields import Event
from ledger.hashing import logical_hash, row_content_hashes
from ledger.segment import Identity, segment_file, serialise

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
SPECIAL = (0x80000000, 0xFF800000, 0x7FC00001, 0x7FA00001, 0x00000001, 0xBF000000)
"""−0.0, −inf, a quiet and a signalling NaN with payload, the smallest number, −0.5."""


def value(arrow_type: pa.DataType, row: int) -> Any:
    """A value of a type for row 0 (ordinary), 1 or 2 (extreme)."""
    if pa.types.is_list(arrow_type):
        inner = arrow_type.value_type
        if pa.types.is_float32(inner):
            return np.array(SPECIAL[: 3 * row], np.uint32).view(np.float32)
        if pa.types.is_floating(inner):
            return np.array([0.1, -0.0, np.inf][: row + 1])
        if pa.types.is_integer(inner):
            limits = np.iinfo(inner.to_pandas_dtype())
            return np.array([1, limits.max, limits.min][: row + 1], inner.to_pandas_dtype())
        return [value(inner, row)] * row
    if pa.types.is_boolean(arrow_type):
        return row != 1
    if pa.types.is_timestamp(arrow_type):
        return 1_700_000_000_000_000 + row
    if pa.types.is_integer(arrow_type):
        limits = np.iinfo(arrow_type.to_pandas_dtype())
        return (1, int(limits.max), int(limits.min))[row]
    if pa.types.is_floating(arrow_type):
        return (0.1, -0.0, float("-inf"))[row]
    if pa.types.is_string(arrow_type):
        return ("text", "", "ü 漢 🙂")[row]
    width = arrow_type.byte_width if pa.types.is_fixed_size_binary(arrow_type) else row
    return bytes([row] * width)


def rows(cls: type[Event]) -> list[Event]:
    """Three events; in the second every nullable field is null."""
    return [
        cls(
            **{c.name: None if c.nullable and row == 1 else value(c.type, row) for c in cls.COLUMNS}
        )
        for row in range(3)
    ]


def plain(item: Any) -> Any:
    """A JSON form in which equality means equality of all bits."""
    if isinstance(item, np.ndarray):
        return {"dtype": str(item.dtype), "hex": item.tobytes().hex()}
    if isinstance(item, bytes):
        return {"hex": item.hex()}
    if isinstance(item, float):
        return {"float64": np.float64(item).tobytes().hex()}
    return [plain(each) for each in item] if isinstance(item, list) else item


def fields(event: Event) -> dict[str, Any]:
    """All fields of an event in their JSON form."""
    return {c.name: plain(getattr(event, c.name)) for c in event.COLUMNS}


def main() -> None:
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for kind, cls in sorted(EVENTS.items()):
        name = f"{kind}-{cls.LAYOUT}"
        if name in expected:
            continue
        events = rows(cls)
        table = events_to_table(events)
        pieces = serialise(table, Identity("golden", "main", "make_layout", 1, 0, 0))
        file = segment_file("golden", table.num_rows, pieces)
        (HERE / f"{name}.arrow").write_bytes(b"".join(pieces))
        expected[name] = {
            "file_hash": file.file_hash.hex(),
            "logical_hash": logical_hash(table).hex(),
            "row_content_hashes": [h.hex() for h in row_content_hashes(table)],
            "events": [fields(event) for event in events],
        }
    EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
