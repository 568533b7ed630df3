"""Reading a Hugging Face config.json, key by key, with an error that names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain

__all__ = ["boolean", "integer", "number", "read_config", "require", "unsupported"]


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model folder.

    Raises NotFound where there is none, Corrupt where it is not a JSON object.
    """
    path = Path(model_dir) / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise NotFound(
            explain(
                "reading a model",
                on=str(model_dir),
                expected="a Hugging Face model folder with config.json",
                found="no config.json" if absent else f"{type(error).__name__}: {error}",
                do="check the option that named it: --hf-checkpoint, --ref-load, "
                "--opd-teacher-load or --critic-load",
            )
        ) from error
    except UnicodeDecodeError as error:
        raise Corrupt(
            explain("reading a model", on=str(path), expected="JSON in UTF-8", found=error)
        ) from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            explain("reading a model", on=str(path), expected="JSON", found=error)
        ) from error
    if not isinstance(config, dict):
        raise Corrupt(
            explain("reading a model", on=str(path), expected="a JSON object", found=text[:40])
        )
    return config


def number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A finite number above 0; `default`, if there is one, where the key is not set."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise unsupported(key, "a number above 0", value)


def integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of `keys` that is set; `default`, if there is one, where none of them is."""
    if default is not None and all(config.get(key) is None for key in keys):
        return default
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise unsupported(" or ".join(keys), "a positive whole number", config.get(keys[0]))


def boolean(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """True or false; `default` where the key is not set."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise unsupported(key, "true or false", value)


def require(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raises InvalidArgument where the key is set to something that is not `allowed`."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise unsupported(key, allowed[0], value)


def unsupported(
    key: str, expected: object, found: object, do: str | None = None
) -> InvalidArgument:
    """The error for a key whose value cannot be built."""
    return InvalidArgument(
        explain(
            "building a model from its Hugging Face configuration",
            on=key,
            expected=expected,
            found="nothing" if found is None else found,
            do=do
            or "use a model of a supported architecture, or add it to trainer/architecture.py",
        )
    )
