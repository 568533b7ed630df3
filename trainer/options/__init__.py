"""The options of `ledger-train`, a module a group; `trainer.options.option` says what one is.

A *content* option decides what comes out: it is recorded in `run_started`, and continuing a run
with another value is refused. A *place* option says where, how long or how often (paths, names,
intervals, limits): it may differ between the processes that continue one run.

Names are those of slime and Megatron-LM where they have the option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.options import (
    advantages,
    algorithm,
    batch,
    checkpoint,
    ledger,
    losses,
    models,
    optimizer,
    parallelism,
    rollout,
    routing,
    tracking,
)
from trainer.options.option import Group, Option

__all__ = ["OPTIONS", "Option", "add_options"]

OPTIONS: tuple[Option, ...] = (
    *ledger.OPTIONS,
    *checkpoint.OPTIONS,
    *rollout.OPTIONS,
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

_TITLES: Mapping[Group, str] = {
    "ledger": "ledger",
    "checkpoint": "checkpoint",
    "rollout": "rollout",
    "algorithm": "algorithm",
    "batch": "batch",
    "routing": "routing replay",
    "parallelism": "parallelism",
    "optimizer": "optimizer",
    "megatron": "Megatron-Core, by its own names",
    "tracking": "metrics",
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is expected, found {text}")
    return value


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option] = OPTIONS) -> None:
    """Add the options, grouped. What is not given on the command line is absent from the result."""
    for group, title in _TITLES.items():
        section = parser.add_argument_group(title)
        for option in options:
            if option.group != group:
                continue
            shown = "" if option.default is None else f" (default: {option.default})"
            keywords: dict[str, Any] = {
                "dest": option.name,
                "default": argparse.SUPPRESS,
                "help": (option.help + shown).replace("%", "%%"),
            }
            if option.type is bool:
                keywords["action"] = argparse.BooleanOptionalAction
            elif option.type == "json":
                keywords.update(type=_json_object, metavar="JSON")
            else:
                metavar = {int: "N", float: "X", str: "NAME"}[option.type]
                keywords.update(type=option.type, choices=option.choices)
                if option.choices is None:
                    keywords["metavar"] = metavar
            section.add_argument(option.flag, **keywords)
