"""Safetensors files of a Hugging Face model folder: which there are, and reading them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ledger.errors import Corrupt, NotFound, StorageFailed, explain

__all__ = [
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "copy_model_files",
    "is_weights_file",
    "open_file",
    "open_safetensors",
    "read_safetensors",
    "weight_files",
]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of a model folder that go along as they are, where they exist."""
_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def is_weights_file(name: str) -> bool:
    """Whether a file of this name holds weights: the only one, or a shard."""
    return name == WEIGHTS_FILE or _SHARD_FILE.fullmatch(name) is not None


def copy_model_files(source: Path, target: Path) -> None:
    """Copy tokenizer and generation settings, what there is of them, from one folder to another."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def read_safetensors(model_dir: str | Path) -> dict[str, Tensor]:
    """Every tensor of a model folder by name: of model.safetensors, or of the shards of its index.

    It holds the whole model; `trainer.weights.handles.open_files` does not. Raises as
    `open_safetensors`.
    """
    return {name: file.get_tensor(name) for name, file in open_safetensors(model_dir).items()}


def open_safetensors(model_dir: str | Path) -> dict[str, Any]:
    """Name of every tensor of a model folder → the open file that holds it. Reads headers alone.

    Raises NotFound where a file is missing; Corrupt where one cannot be parsed (it was cut short),
    where two hold one tensor, or where one lacks a tensor that the index says it has; StorageFailed
    where one cannot be read.
    """
    folder = Path(model_dir)
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path in weight_files(folder):
        file = open_file(folder, path)
        for name in file.keys():  # noqa: SIM118 - no mapping
            if name in found:
                raise Corrupt(
                    explain(
                        "reading weights",
                        on=f"{folder}, tensor {name}",
                        expected="one file that holds it",
                        found=f"{places[name]} and {path.name}",
                        do="copy the model again",
                    )
                )
            found[name], places[name] = file, path.name
    if (folder / WEIGHTS_FILE).is_file():
        return found
    for name, said in _weight_map(folder).items():
        if places.get(name) != said:
            raise Corrupt(
                explain(
                    "reading weights",
                    on=f"{folder}, tensor {name}",
                    expected=f"in {said}, as {INDEX_FILE} says",
                    found=places.get(name, "in no file"),
                    do="copy the model again",
                )
            )
    return found


def open_file(folder: Path, path: Path) -> Any:
    """safetensors' open file. `folder` is what an error names. Raises as `open_safetensors`."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise _missing(folder, path.name) from error
    except OSError as error:
        raise StorageFailed(
            explain("reading weights", on=str(path), expected="a readable file", found=error)
        ) from error
    except SafetensorError as error:
        raise Corrupt(
            explain(
                "reading weights",
                on=str(path),
                expected="a whole safetensors file",
                found=error,
                do="copy the model again",
            )
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, sorted by name: model.safetensors, or its shards.

    Raises NotFound where there is neither, Corrupt where the index cannot be used.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _missing(folder, WEIGHTS_FILE)
    try:
        stated = json.loads(index.read_text("utf-8"))["weight_map"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(
            explain("reading weights", on=str(index), expected="a weight_map", found=repr(error))
        ) from error
    names = {str(tensor): str(name) for tensor, name in stated}
    outside = [name for name in names.values() if Path(name).name != name]
    if outside:
        raise Corrupt(
            explain(
                "reading weights",
                on=str(index),
                expected="names of files beside it",
                found=outside[0],
            )
        )
    return names


def _missing(folder: Path, name: str) -> NotFound:
    return NotFound(
        explain(
            "reading weights",
            on=str(folder),
            expected=f"{name} (or {INDEX_FILE} and its shards)",
            found="no such file",
            do="check the path of the model or checkpoint",
        )
    )
