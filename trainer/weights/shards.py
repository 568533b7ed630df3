"""Writing a Hugging Face model folder: weights in one file or in shards with an index.

Shards are cut as transformers cuts them: tensors in their order, a new shard where the next tensor
would not fit, one of its own for a tensor that is larger than a shard. Tensors are taken one at a
time; no more than one shard of them and the next one are held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.weights.files import INDEX_FILE, WEIGHTS_FILE, is_weights_file

__all__ = ["MAX_SHARD_SIZE", "Shard", "finish_shards", "write_safetensors", "write_shards"]

MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in a shard, unless one tensor alone is larger."""

_NO_PARAMETER = "e_score_correction_bias"
"""Last part of the names of tensors that transformers does not count as parameters."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of weights under a passing name, and what is in it."""

    path: Path
    names: tuple[str, ...]
    parameters: int
    """Elements of the tensors that are parameters."""
    size_bytes: int
    """Of the tensors."""
    dtypes: tuple[str, ...]
    """Of the parameters, sorted, each once."""


def write_safetensors(
    directory: str | Path,
    named: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> list[Path]:
    """Write config.json and the weights into an existing folder; transformers can load it.

    `named` are the tensors in the order of the files, usually sorted by name. Up to
    `max_shard_size` bytes they are model.safetensors, beyond it shards and their index. Weights
    that the folder held before are removed. Returns the paths written.

    Not synced to disk, and not atomic: who needs that writes into a fresh folder, syncs the
    returned paths, and renames the folder.
    """
    shards = write_shards(directory, named, max_shard_size=max_shard_size)
    return finish_shards(directory, shards, config)


def write_shards(
    directory: str | Path,
    named: Iterable[tuple[str, Tensor]],
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    writer: int = 0,
) -> list[Shard]:
    """Write tensors into files under passing names, for `finish_shards`.

    Several ranks may write into one folder at once, each as another `writer`.

    Raises InvalidArgument for a size that is no positive number.
    """
    if max_shard_size < 1:
        raise InvalidArgument(
            explain("writing weights", on="max_shard_size", expected="≥ 1", found=max_shard_size)
        )
    shards: list[Shard] = []
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if tensor.nbytes > max_shard_size:
            shards.append(_write(directory, {name: _plain(tensor)}, writer, len(shards)))
            continue
        if held and size + tensor.nbytes > max_shard_size:
            shards.append(_write(directory, held, writer, len(shards)))
            held, size = {}, 0
        held[name] = _plain(tensor)
        size += tensor.nbytes
    if held:
        shards.append(_write(directory, held, writer, len(shards)))
    return shards


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _write(directory: str | Path, held: dict[str, Tensor], writer: int, number: int) -> Shard:
    path = Path(directory) / f".model-{writer:05d}-{number:05d}.safetensors"
    save_file(held, path, metadata={"format": "pt"})
    parameters = [t for name, t in held.items() if not name.endswith(_NO_PARAMETER)]
    return Shard(
        path,
        tuple(held),
        sum(tensor.numel() for tensor in parameters),
        sum(tensor.nbytes for tensor in held.values()),
        tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters})),
    )


def finish_shards(
    directory: str | Path, shards: Sequence[Shard], config: Mapping[str, Any]
) -> list[Path]:
    """Give the files their names, and write config.json and, for several of them, the index.

    Where config.json states a dtype, it becomes that of the weights: transformers would round them
    to it. Returns the paths written.

    Raises InvalidArgument where two shards hold one tensor, or there is none.
    """
    folder = Path(directory)
    names = [name for shard in shards for name in shard.names]
    if not names or len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgument(
            explain(
                "writing weights",
                on=str(folder),
                expected="each tensor once",
                found=f"{twice[0]} twice" if twice else "no tensor",
            )
        )
    count = len(shards)
    final = [
        WEIGHTS_FILE if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors"
        for n in range(1, count + 1)
    ]
    for path in list(folder.iterdir()):
        if is_weights_file(path.name) or path.name == INDEX_FILE:
            path.unlink()
    written = [_write_json(folder / "config.json", _with_dtype(config, shards))]
    readable = written[0].stat().st_mode & 0o777  # safetensors makes its files private
    for shard, name in zip(shards, final, strict=True):
        os.chmod(shard.path, readable)
        os.rename(shard.path, folder / name)
        written.append(folder / name)
    if count > 1:
        index = {
            "metadata": {
                "total_parameters": sum(shard.parameters for shard in shards),
                "total_size": sum(shard.size_bytes for shard in shards),
            },
            "weight_map": {
                tensor: name
                for shard, name in zip(shards, final, strict=True)
                for tensor in shard.names
            },
        }
        written.append(_write_json(folder / INDEX_FILE, index))
    return written


def _with_dtype(config: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """The configuration with the dtype of the weights, where it states one and they have one."""
    stated = dict(config)
    dtypes = {dtype for shard in shards for dtype in shard.dtypes}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        stated |= {key: dtype for key in ("dtype", "torch_dtype") if key in stated}
    return stated


def _write_json(path: Path, content: Mapping[str, Any]) -> Path:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    return path
