"""Dynamic filters: whether a group of scored samples is worth training on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ledger.errors import InvalidArgument, explain
from rollout.imports import IMPORT_PATH, is_import_path, load_function
from rollout.rewards import ScoredSample
from rollout.slime.convert import scored_as_slime

_SETTING = "--dynamic-sampling-filter-path"

_NONZERO = "check_reward_nonzero_std"
_ELSEWHERE = tuple(
    f"{package}.rollout.filter_hub.dynamic_sampling_filters.{_NONZERO}"
    for package in ("slime", "miles")
)
"""Where slime and Miles have it."""

__all__ = ["DynamicFilterOutput", "GroupFilter", "check_reward_nonzero_std", "create_filter"]


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """Whether a group is kept, and why not. As in slime."""

    keep: bool
    reason: str | None = None


GroupFilter = Callable[[Any, Sequence[ScoredSample]], DynamicFilterOutput]
"""slime's signature: (args, samples of one group) to a decision."""


def check_reward_nonzero_std(args: Any, samples: Sequence[ScoredSample]) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: where all are equal, every group advantage is zero.

    A group of one sample has no deviation and is dropped too. Compared by equality, not by a
    computed deviation, which rounding can make a little more than zero.
    """
    rewards = np.array([sample.get_reward_value(args) for sample in samples], dtype=np.float64)
    if bool((rewards != rewards[0]).any()):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(
        keep=False, reason=f"zero reward deviation: all {float(rewards[0])!r}"
    )


def _keep_all(args: Any, samples: Sequence[ScoredSample]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=True)


def create_filter(name: str) -> GroupFilter:
    """A filter by name ('check_reward_nonzero_std', 'none') or import path.

    A custom one is called as slime does, with `args` and a list of `Sample`. It may return
    `DynamicFilterOutput`, anything with `keep` and `reason`, or a bool, numpy's included.

    Raises:
        InvalidArgument: no filter of that name, or (when called) an exception of the custom one,
            or an answer that is none of these.
    """
    if name in (_NONZERO, *_ELSEWHERE):
        return check_reward_nonzero_std
    if name == "none":
        return _keep_all
    if not is_import_path(name):
        raise InvalidArgument(
            explain(
                "making a dynamic filter",
                on=_SETTING,
                expected=f"check_reward_nonzero_std, none, or {IMPORT_PATH}",
                found=repr(name),
            )
        )
    function = load_function(name, setting=_SETTING)

    def custom(args: Any, samples: Sequence[ScoredSample]) -> DynamicFilterOutput:
        where = f"{_SETTING} {name}, group {samples[0].group_index}"
        try:
            given = getattr(args, "arguments", None)
            found = function(
                args if given is None else given, [scored_as_slime(one) for one in samples]
            )
        except Exception as error:
            raise InvalidArgument(
                explain(
                    "filtering a group",
                    on=where,
                    expected="a bool or an object with keep and reason",
                    found=f"{type(error).__name__}: {error}",
                )
            ) from error
        if isinstance(found, (bool, np.bool_)):
            return DynamicFilterOutput(
                keep=bool(found), reason=None if found else f"dropped by {name}"
            )
        keep, reason = getattr(found, "keep", None), getattr(found, "reason", None)
        if not isinstance(keep, (bool, np.bool_)):
            raise InvalidArgument(
                explain(
                    "filtering a group",
                    on=where,
                    expected="a bool or an object with keep and reason",
                    found=repr(found),
                )
            )
        return DynamicFilterOutput(keep=bool(keep), reason=None if reason is None else str(reason))

    return custom
