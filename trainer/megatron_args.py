"""Megatron's own settings under their own names, derived from its configuration classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["passed_on"]


def passed_on(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields of the configuration class `kind`."""
    return {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}
