"""One text, and so one digest, for one value: JSON with sorted keys and no spaces."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ledger.errors import InvalidArgument, explain

__all__ = ["canonical_json", "canonical_text", "json_digest"]


def canonical_json(obj: object) -> str:
    """JSON of `obj` that depends on its value only: keys sorted, no spaces, floats shortest.

    Dataclasses become objects, paths strings, bytes hexadecimal text, tuples and arrays lists.

    Raises:
        InvalidArgument: a NaN or infinity, a key that is not text, or a type without a canonical
            form (a set, say, has no order).
    """
    return canonical_text(_plain(obj, "$"))


def canonical_text(plain: object) -> str:
    """As `canonical_json`, of what is JSON already: text keys, no bytes, no arrays."""
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def json_digest(obj: object) -> bytes:
    """blake3 (32 bytes) of `canonical_json(obj)` in UTF-8."""
    return blake3(canonical_json(obj).encode()).digest()


_ATOMS = frozenset({str, int, bool, type(None)})
"""Types that JSON has; long lists and tables hold little else."""


def _plain(obj: object, where: str) -> Any:
    if obj is None or isinstance(obj, bool | str):
        return obj
    if isinstance(obj, enum.Enum):
        return _plain(obj.value, where)
    if isinstance(obj, int | np.integer):
        return int(obj)
    if isinstance(obj, float | np.floating):
        if not math.isfinite(obj):
            raise _refused(where, "a finite number", repr(obj))
        return float(obj)
    if isinstance(obj, np.bool_):
        return bool(obj)
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, bytes):
        return obj.hex()
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {
            f.name: _plain(getattr(obj, f.name), f"{where}.{f.name}")
            for f in dataclasses.fields(obj)
        }
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise _refused(where, "keys that are text", repr(key))
        # Most values are plain already: a call and a name for each would cost most of the time.
        return {
            key: value
            if type(value) in _ATOMS
            else value.hex()
            if type(value) is bytes
            else _plain(value, f"{where}.{key}")
            for key, value in obj.items()
        }
    if isinstance(obj, list | tuple | np.ndarray):
        return [
            value if type(value) in _ATOMS else _plain(value, f"{where}[{i}]")
            for i, value in enumerate(obj)
        ]
    raise _refused(where, "a value with one canonical JSON form", type(obj).__name__)


def _refused(where: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain("a value has no canonical JSON", on=where, expected=expected, found=found)
    )
