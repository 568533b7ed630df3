"""A Hugging Face folder into a `transformers` model, or a reason why not that a person can act on.

The engine is what opens a model folder first, so what is wrong with the folder shows here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ledger.errors import Corrupt, InvalidArgument, LedgerError, NotFound, explain
from rollout.quiet import without_progress_bars

__all__ = ["load_model"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(folder: Path, *, dtype: Any, attn_implementation: str) -> Any:
    """The causal language model of `folder`, on the CPU.

    Raises:
        NotFound: the folder, its config.json or its weights are not there.
        Corrupt: config.json is not a JSON object, or a file of weights is cut short.
        InvalidArgument: transformers does not know the model, or cannot build it.
    """
    import transformers

    _check_config(folder)
    _check_weights(folder)
    try:
        with without_progress_bars():
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
            )
    except Exception as error:  # transformers raises nearly anything for a folder that is wrong
        raise InvalidArgument(
            explain(
                "loading a model",
                on=str(folder),
                expected="a model that transformers can build: config.json with model_type and "
                "every size, and weights that fit",
                found=_first_line(error),
                do="save the model with save_pretrained, or name another folder",
            )
        ) from error


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise _missing(folder, "no config.json" if folder.is_dir() else "no such folder")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "a JSON object", f"{type(error).__name__}: {error}") from error
    if not isinstance(config, dict):
        raise _corrupt(path, "a JSON object", f"a {type(config).__name__}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        named = config.get("architectures")
        raise InvalidArgument(
            explain(
                "loading a model",
                on=str(path),
                expected='a "model_type", such as "llama" or "qwen3_moe"',
                found="none" + (f" (architectures: {named})" if named else ""),
                do="save the model with save_pretrained, or name another folder",
            )
        )


def _check_weights(folder: Path) -> None:
    if (folder / _WEIGHTS).is_file():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).is_file():
        try:
            names = json.loads((folder / _INDEX).read_bytes())["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _corrupt(
                folder / _INDEX, "a weight_map of file names", f"{type(error).__name__}: {error}"
            ) from error
    else:
        raise _missing(folder, f"no {_WEIGHTS}")
    for path in files:
        if not path.is_file():
            raise _missing(folder, f"no {path.name}")
        try:
            with safe_open(path, framework="np"):
                pass  # reads the header, and compares the size that it says with the file's
        except (SafetensorError, OSError) as error:
            raise _corrupt(path, "a whole safetensors file", str(error)) from error


def _missing(folder: Path, found: str) -> LedgerError:
    return NotFound(
        explain(
            "loading a model",
            on=str(folder),
            expected=f"a Hugging Face folder with config.json and {_WEIGHTS}",
            found=found,
            do="make one: python -m rollout.models tiny --output DIR",
        )
    )


def _corrupt(path: Path, expected: str, found: str) -> LedgerError:
    return Corrupt(
        explain("loading a model", on=str(path), expected=expected, found=found, do="copy it again")
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
