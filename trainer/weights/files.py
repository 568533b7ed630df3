"""Safetensors files of a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ledger.errors import Corrupt, NotFound, StorageFailed, explain

__all__ = ["WEIGHTS_FILE", "read_safetensors", "write_safetensors"]

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def read_safetensors(model_dir: str | Path) -> dict[str, Tensor]:
    """Every tensor of a model folder by name: of model.safetensors, or of the shards of its index.

    Raises NotFound where there is no such file, Corrupt where one cannot be parsed (it was cut
    short), StorageFailed where one cannot be read.
    """
    folder = Path(model_dir)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    tensors[name] = file.get_tensor(name)
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
    return tensors


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / _INDEX_FILE
    if not index.is_file():
        raise _missing(folder, WEIGHTS_FILE)
    try:
        names = {str(n) for n in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(
            explain("reading weights", on=str(index), expected="a weight_map", found=repr(error))
        ) from error
    return [folder / name for name in sorted(names)]


def _missing(folder: Path, name: str) -> NotFound:
    return NotFound(
        explain(
            "reading weights",
            on=str(folder),
            expected=f"{name} (or {_INDEX_FILE} and its shards)",
            found="no such file",
            do="check the path of the model or checkpoint",
        )
    )


def write_safetensors(
    directory: str | Path, named: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
) -> list[Path]:
    """Write model.safetensors and config.json into an existing folder; transformers can load it.

    Not synced to disk: who needs that syncs the returned paths.
    """
    folder = Path(directory)
    weights, config_path = folder / WEIGHTS_FILE, folder / "config.json"
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in named},
        weights,
        metadata={"format": "pt"},
    )
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    config_path.write_text(text, encoding="utf-8")
    return [config_path, weights]
