"""Custom functions by import path: `module:function` or, as in slime, `package.module.function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["IMPORT_PATH", "is_import_path", "load_function"]

IMPORT_PATH = "module:function (or package.module.function)"
"""What an import path looks like, for messages."""


def is_import_path(name: str) -> bool:
    """Whether `name` can only be an import path, not one of our short names."""
    return ":" in name or "." in name


def _import(module: str) -> Any:
    """Import a module. What it wants of slime, where that is not installed, `rollout.slime` has."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name
        if missing not in ("slime", "miles"):
            raise
    from rollout.slime.stand_in import offer

    offer(missing)
    return importlib.import_module(module)


def load_function(path: str, *, setting: str) -> Callable[..., Any]:
    """Import the function that `path` names; `setting` is the flag that named it.

    Raises:
        InvalidArgument: the module cannot be imported (its own exception is the cause), has no such
            attribute, or what it has cannot be called.
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found: Any = getattr(_import(module), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise InvalidArgument(
            explain(
                "importing a function",
                on=f"{setting} {path}",
                expected=f"an importable {IMPORT_PATH}",
                found=f"{type(error).__name__}: {error}",
                do="check the spelling, and that the module's folder is on PYTHONPATH",
            )
        ) from error
    if not callable(found):
        raise InvalidArgument(
            explain(
                "importing a function",
                on=f"{setting} {path}",
                expected="a function",
                found=f"a {type(found).__name__}",
            )
        )
    return found  # type: ignore[no-any-return]
