"""Look a function up by its registered name, or import a custom one by its path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ledger.errors import InvalidArgument, explain

__all__ = ["resolve"]

_F = TypeVar("_F", bound=Callable[..., Any])


def resolve(registry: Mapping[str, _F], name: str, *, setting: str) -> _F:
    """The function that `name` stands for.

    `name` is a key of `registry`, or "package.module:function" for one's own; the caller checks
    what such a function returns. `setting` is the command-line name, for the message.

    Raises InvalidArgument: an unknown name (the known ones are listed), a module that cannot be
    imported (its own exception is the cause), or a path that is not callable.
    """
    if ":" not in name:
        found = registry.get(name)
        if found is None:
            raise InvalidArgument(
                explain(
                    "looking up an algorithm",
                    on=setting,
                    expected=f"one of {', '.join(sorted(registry))}; or package.module:function",
                    found=repr(name),
                )
            )
        return found
    module_name, _, attribute = name.partition(":")
    try:
        custom: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            explain(
                "importing a custom algorithm",
                on=setting,
                expected="an importable package.module:function",
                found=f"{name!r} ({type(error).__name__}: {error})",
                do="check the spelling, and that the module is on PYTHONPATH",
            )
        ) from error
    if not callable(custom):
        raise InvalidArgument(
            explain(
                "importing a custom algorithm",
                on=setting,
                expected="a function",
                found=f"{name!r} is a {type(custom).__name__}",
            )
        )
    return custom  # type: ignore[no-any-return]
