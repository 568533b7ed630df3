"""The formats of checkpoints, and which one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.rank_count import ranks_of

__all__ = ["CKPT_FORMATS", "DIST_FORMAT", "FORMAT", "format_of"]

FORMAT = "hf-safetensors-1"
"""Stable name of the format, as in `checkpoint_saved`: tensors by canonical names."""
DIST_FORMAT = "torch_dist-1"
"""The one with Megatron's shards."""
CKPT_FORMATS = {"hf": FORMAT, "torch_dist": DIST_FORMAT}
"""`--ckpt-format` → the name of the format in events."""


def format_of(values: Mapping[str, Any]) -> str:
    """The format that the options ask for; without one, Megatron's where there are several ranks.

    Raises InvalidArgument for one that cannot be saved asynchronously where that is asked for.
    """
    name = values["ckpt_format"] or ("torch_dist" if ranks_of(values) > 1 else "hf")
    if values["async_save"] and name == "hf":
        raise InvalidArgument(
            explain(
                "saving checkpoints",
                on="--async-save",
                expected="--ckpt-format torch_dist, whose shards are written in the background",
                found=f"--ckpt-format {name}",
            )
        )
    return CKPT_FORMATS[name]
