"""Custom functions by import path: `package.module:name` or, as in slime, `package.module.name`."""

from __future__ import annotations

import importlib
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["is_import_path", "load_object"]


def is_import_path(name: str) -> bool:
    """Whether `name` can only be an import path, not one of our short names."""
    return "." in name


def load_object(path: str, *, what: str) -> Any:
    """Import what `path` names.

    Raises:
        InvalidArgument: the module cannot be imported or has no such attribute.
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            explain(
                f"loading a custom {what}",
                on=path,
                expected="an importable package.module.name",
                found=f"{type(error).__name__}: {error}",
                do="run from the folder that holds the module, or install it",
            )
        ) from error
