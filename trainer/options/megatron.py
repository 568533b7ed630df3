"""Megatron-Core's own settings, one option a field of its configuration classes.

What is not given is left to Megatron, and to what this package sets; only what is given is
recorded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trainer.megatron_args import Field, megatron_fields

if TYPE_CHECKING:
    from trainer.options.option import Option

__all__ = ["megatron_options", "refused_fields"]

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}


@lru_cache(maxsize=2)
def megatron_options(taken: frozenset[str]) -> tuple[Option, ...]:
    """The options for every field that is not in `taken`, the names of this package's own."""
    from trainer.options.option import Option

    return tuple(
        Option(
            field.name,
            "megatron",
            _TYPES.get(field.kind or "", field.kind),
            None,
            f"{field.help or 'see its docstring'} [{field.owner}; Megatron's default: "
            f"{field.default}]",
            choices=field.choices,
        )
        for field in megatron_fields()
        if field.refusal is None and field.name not in taken
    )


def refused_fields(taken: frozenset[str]) -> tuple[Field, ...]:
    """The fields that cannot be given, each with its reason."""
    return tuple(
        field
        for field in megatron_fields()
        if field.refusal is not None and field.name not in taken
    )
