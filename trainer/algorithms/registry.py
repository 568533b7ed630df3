"""Look a function up by its registered name, or import a custom one by its path."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ledger.errors import InvalidArgument, explain

__all__ = ["resolve"]

_F = TypeVar("_F", bound=Callable[..., Any])


def resolve(registry: Mapping[str, _F], name: str, *, setting: str) -> _F:
    """The function that `name` stands for.

    `name` is a key of `registry`, or "module:function" (or "package.module.function") for one's
    own; what such a function raises becomes InvalidArgument, and the caller checks what it returns.
    `setting` is the command-line name, for the message.

    Raises InvalidArgument: an unknown name (the known ones are listed), a module that cannot be
    imported (its own exception is the cause), or a path that is not callable.
    """
    if name in registry:
        return registry[name]
    if ":" not in name and "." not in name:
        raise InvalidArgument(
            explain(
                "looking up an algorithm",
                on=setting,
                expected=f"one of {', '.join(sorted(registry))}; or module:function",
                found=repr(name),
            )
        )
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        custom: Any = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise InvalidArgument(
            explain(
                "importing a custom algorithm",
                on=setting,
                expected="an importable module:function (or package.module.function)",
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
    return _translating(custom, name, setting)  # type: ignore[return-value]


def _translating(custom: Callable[..., Any], name: str, setting: str) -> Callable[..., Any]:
    """`custom`, whose own exceptions become InvalidArgument that name the setting."""

    def called(batch: Any, settings: Any) -> Any:
        try:
            return custom(batch, settings)
        except Exception as error:
            raise InvalidArgument(
                explain(
                    "calling a custom algorithm",
                    on=f"{setting} {name}, {_size(batch)}",
                    expected=f"a function of ({type(batch).__name__}, {type(settings).__name__})",
                    found=f"{type(error).__name__}: {error}{_raised_at(error)}",
                )
            ) from error

    return called


def _raised_at(error: Exception) -> str:
    """Where it was raised, below the call: file, line and function of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return (
        f", raised at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
        if frames
        else ""
    )


def _size(batch: Any) -> str:
    """Which data it was, in words: the samples of an estimator, or the tokens of a loss."""
    rollouts = getattr(batch, "rollout_id_B", None)
    if rollouts is not None:
        shown = ", ".join(str(r) for r in rollouts[:4]) + (", …" if len(rollouts) > 4 else "")
        return f"batch of {len(rollouts)} samples, rollouts {shown}"
    samples, log_probs = (getattr(batch, name, None) for name in ("n_sequences", "log_probs_N"))
    if samples is None or log_probs is None:
        return "micro-batch"
    return f"micro-batch of {samples} samples, {len(log_probs)} response tokens"
