"""A model folder written by all ranks at once: each writes what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.ranks import all_gather_object, broadcast_object, is_writer
from trainer.weights.shards import MAX_SHARD_SIZE, Shard, finish_shards, write_shards
from trainer.weights.transfer import export_weights

__all__ = ["export_folder"]


def export_folder(
    model: Any,
    directory: str | Path,
    config: Mapping[str, Any],
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> list[Path]:
    """Write a model as a Hugging Face folder, which `transformers` loads. Collective.

    `model` is this rank's chunk, or the list of its chunks; `directory` is an existing folder that
    all ranks see. Each rank writes shards of its own and holds no more than one of them. Returns
    the paths written, on every rank; nothing is synced (see `write_safetensors`).
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    named = export_weights(model, to="spread")
    own = write_shards(directory, named, max_shard_size=max_shard_size, writer=rank)
    shards: list[Shard] = [shard for of_rank in all_gather_object(own) for shard in of_rank]
    written = finish_shards(directory, shards, config) if is_writer() else []
    return broadcast_object(written)
