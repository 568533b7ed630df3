"""The reward that the options of a command line name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.custom_reward import CustomReward, CustomRewards
from rollout.rewards import RewardFunction, create_reward

__all__ = ["reward_function"]


def reward_function(
    values: Mapping[str, Any], own: str, *, args: Any = None, evaluation: bool = False
) -> RewardFunction:
    """--custom-rm-path, else --rm-type, else `own`: the name of the reward of the prompt source.

    `args` is what a custom function gets as slime's `args`. An evaluation scores sample by sample,
    and has --eval-reward-key.

    Raises InvalidArgument for options that do not go together, and as `create_reward`.
    """
    path, kind = values["custom_rm_path"], values["rm_type"]
    if path is not None and kind is not None:
        raise _refused("--custom-rm-path and --rm-type", "one of them", "both")
    for option in ("group_rm", "reward_key", "eval_reward_key"):
        if values[option] and path is None:
            flag = "--" + option.replace("_", "-")
            raise _refused(flag, "--custom-rm-path, whose function it is about", "none")
    if path is not None:
        key = values["reward_key"]
        if evaluation:
            if values["group_rm"]:
                raise _refused(
                    "--group-rm and evaluations",
                    "a function that scores one sample",
                    "one that compares the samples of a group",
                )
            key = values["eval_reward_key"] or key
        return (CustomRewards if values["group_rm"] else CustomReward)(path, args, key)
    return create_reward(kind or own, args=args, limit_s=values["rm_timeout"], url=values["rm_url"])


def _refused(on: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain("choosing how answers are judged", on=on, expected=expected, found=found)
    )
