"""The options of `ledger-train`, a module a group; `trainer.options.option` says what one is.

A *content* option decides what comes out: it is recorded in `run_started`, and continuing a run
with another value is refused. A *place* option says where, how long or how often (paths, names,
intervals, limits): it may differ between the processes that continue one run.

Names are those of slime and Megatron-LM where they have the option.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.megatron_fixed import AS_IT_IS
from trainer.options import (
    advantages,
    agents,
    algorithm,
    async_rollout,
    batch,
    checkpoint,
    data,
    elsewhere,
    engine_weights,
    ledger,
    losses,
    models,
    optimizer,
    parallelism,
    rewards,
    rollout,
    routing,
    sglang,
    tracking,
)
from trainer.options.megatron import megatron_options, refused_fields
from trainer.options.option import Group, Option

__all__ = ["OPTIONS", "Option", "add_options", "passed_on_options"]

OPTIONS: tuple[Option, ...] = (
    *ledger.OPTIONS,
    *checkpoint.OPTIONS,
    *rollout.OPTIONS,
    *engine_weights.OPTIONS,
    *sglang.OPTIONS,
    *async_rollout.OPTIONS,
    *data.OPTIONS,
    *elsewhere.OPTIONS,
    *rewards.OPTIONS,
    *agents.OPTIONS,
    *advantages.OPTIONS,
    *algorithm.OPTIONS,
    *losses.OPTIONS,
    *batch.OPTIONS,
    *routing.OPTIONS,
    *parallelism.OPTIONS,
    *optimizer.OPTIONS,
    *models.OPTIONS,
    *tracking.OPTIONS,
)

_NAMES = frozenset(option.name for option in OPTIONS)


def passed_on_options() -> tuple[Option, ...]:
    """Megatron-Core's own settings: options without a default here, recorded where given."""
    return megatron_options(_NAMES)


_TITLES: Mapping[Group, str] = {
    "ledger": "ledger",
    "checkpoint": "checkpoint",
    "rollout": "rollout",
    "engines": "SGLang engines",
    "engine weights": "weights of engines",
    "agents": "episodes with an environment",
    "data": "prompt data and rewards",
    "algorithm": "algorithm",
    "batch": "batch",
    "routing": "routing replay",
    "parallelism": "parallelism",
    "optimizer": "optimizer",
    "tracking": "metrics",
    "megatron": "Megatron-Core, by its own names",
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is expected, found {text}")
    return value


class _OneOrMore(argparse.Action):
    """A list, or the value itself where only one is given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


class _Nothing(argparse.Action):
    """Sets nothing: the value is in force anyway."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        return


def _refusing(reason: str, in_force: float | str | None) -> Any:
    def refuse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if in_force is not None and type(in_force)(text) == in_force:
                return text
        raise argparse.ArgumentTypeError(f"not passed on to Megatron-Core: {reason}")

    return refuse


def add_options(
    parser: argparse.ArgumentParser,
    options: Sequence[Option] | None = None,
    *,
    show_megatron: bool = True,
) -> None:
    """Add the options, grouped. What is not given on the command line is absent from the result.

    Without `options`: all of this package and of Megatron-Core. A field of Megatron's that cannot
    be given is an option as well, which says why. Without `show_megatron` the help leaves
    Megatron's own settings out, which are several hundred.
    """
    if options is None:
        options = (*OPTIONS, *passed_on_options())
        for field in refused_fields(_NAMES):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=field.name,
                nargs="?",
                const="",
                action=_Nothing,
                type=_refusing(field.refusal or "", AS_IT_IS.get(field.name)),
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    for group, title in _TITLES.items():
        section = parser.add_argument_group(title)
        for option in options:
            if option.group != group:
                continue
            shown = "" if option.default is None else f" (default: {option.default})"
            text = (option.help + shown).replace("%", "%%")
            if group == "megatron" and not show_megatron:
                text = argparse.SUPPRESS
            keywords: dict[str, Any] = {
                "dest": option.name,
                "default": argparse.SUPPRESS,
                "help": text,
            }
            if option.type is bool:
                keywords["action"] = argparse.BooleanOptionalAction
            elif option.type == "json":
                keywords.update(type=_json_object, metavar="JSON")
            else:
                kind = option.type
                if isinstance(kind, str):
                    keywords["nargs"] = "+"
                    if kind.endswith("+"):
                        keywords["action"] = _OneOrMore
                    kind = {"int": int, "float": float, "str": str}[kind[:-1]]
                metavar = {int: "N", float: "X", str: "NAME"}[kind]
                keywords.update(type=kind, choices=option.choices)
                if option.choices is None:
                    keywords["metavar"] = metavar
            section.add_argument(option.flag, **keywords)
