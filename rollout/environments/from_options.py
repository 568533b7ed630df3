"""The episode function that the options of a command line ask for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.environments import create_environment
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.turns import ChatTurns, PlainTurns, TurnFormat
from rollout.episode import EpisodeFunction
from rollout.imports import is_import_path, load_function

__all__ = ["environment_function", "environment_tools"]

_NEED_ONE = (
    "environment_options",
    "environment_turns",
    "environment_keep_history",
    "rollout_max_context_len",
    "compact_context_at",
)


def environment_function(
    values: Mapping[str, Any], tokenizer: Any, stop_token_ids: Sequence[int]
) -> EpisodeFunction | None:
    """What drives the episodes; None where `values` (options by name) name no environment.

    An environment that is an async function is an `EpisodeFunction` itself: it gets the episode,
    and the options by name.

    Raises:
        InvalidArgument: no such environment, options that it does not take or that need one, or a
            chat template that does not go with turns.
        MissingDependency: a library behind it is not installed.
    """
    name = values["environment"]
    if name is None:
        for option in _NEED_ONE:
            if values[option]:
                flag = f"--{option.replace('_', '-')}"
                raise InvalidArgument(
                    explain(
                        "choosing what drives episodes",
                        on=flag,
                        expected="--environment, which it is about",
                        found="none",
                    )
                )
        return None
    limits = EpisodeLimits(
        max_turns=values["max_turns"],
        max_context_tokens=values["rollout_max_context_len"],
        timeout_s=values["environment_timeout_s"],
        compact_at=values["compact_context_at"],
        compact_prompt=values["compact_context_prompt"],
    )
    own = _own_function(name, values["environment_options"])
    if own is not None:
        return own
    make, first = create_environment(name, values["environment_options"])
    kind = values["environment_turns"]
    if kind is None:
        kind = "chat" if values["apply_chat_template"] else "plain"
    turns: TurnFormat = PlainTurns(tokenizer)
    if kind == "chat":
        roles = list(getattr(first, "roles", ("user",)))
        if limits.compact_at is not None:
            roles.append("user")
        turns = ChatTurns(
            tokenizer,
            roles=roles,
            stop_token_ids=stop_token_ids,
            keep_history=values["environment_keep_history"],
            kwargs=values["apply_chat_template_kwargs"],
        )
    return EnvironmentEpisode(first.name, make, turns, limits, str(first.version))


def environment_tools(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of the environment, as chat templates take them; None where it has none.

    Raises as `environment_function` does.
    """
    name = values["environment"]
    if name is None or not values["apply_chat_template"] or _own_function(name, {}) is not None:
        return None
    _, first = create_environment(values["environment"], values["environment_options"])
    return getattr(first, "tool_schemas", None)


def _own_function(name: str, options: Mapping[str, Any]) -> EpisodeFunction | None:
    """The async function that an import path names; None for all else."""
    if name.startswith("reasoning_gym:") or not is_import_path(name):
        return None
    function = load_function(name, setting="--environment")
    if not inspect.iscoroutinefunction(function):
        return None
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise InvalidArgument(
            explain(
                "choosing what drives episodes",
                on=f"--environment {name}",
                expected="an async function of an Episode, and of --environment-options by name",
                found=str(error),
            )
        ) from error
    made = functools.partial(function, **options)
    functools.update_wrapper(made, function)
    return made
