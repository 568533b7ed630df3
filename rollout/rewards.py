"""Rewards: a sample in, a number with its parts out."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from rollout.imports import is_import_path, load_object

__all__ = ["REWARD_NAMES", "Reward", "RewardFunction", "ScoredSample", "create_reward"]

REWARD_NAMES = ("exact_line", "reasoning_gym:<dataset>", "package.module.function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a verifier says of one sample."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class ScoredSample:
    """A finished sample as rewards and filters see it. Names are those of slime's `Sample`."""

    index: int
    group_index: int
    rollout_id: int
    prompt: str
    response: str
    """The response as text, without its stop token. The ids are the truth."""
    tokens: npt.NDArray[np.int32]
    """[T] Prompt, then response."""
    response_length: int
    label: str | None
    metadata: Mapping[str, Any]
    finish_reason: str
    reward: float | None = None
    """None until it is scored."""

    def get_reward_value(self, args: Any = None) -> float:
        """The reward; the argument is slime's and not used."""
        if self.reward is None:
            raise InvalidArgument(
                explain("reading a reward", on=f"sample {self.index}", found="not scored yet")
            )
        return self.reward


class RewardFunction(Protocol):
    """Scores one sample. Equal samples must get equal rewards."""

    name: str
    version: str

    def __call__(self, sample: ScoredSample) -> Reward:
        """Score `sample`."""


class ExactLine:
    """1.0 where the response is exactly the label and then the stop token, else 0.0."""

    name = "exact_line"
    version = "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        """Strict: a right number that runs on, or stops otherwise, is wrong."""
        ended = sample.finish_reason == "stop"
        right = ended and sample.response == sample.label
        return Reward(value=float(right), parts={"ended": float(ended), "right": float(right)})


class GymReward:
    """The verifier of a reasoning-gym data set; strict unless told otherwise.

    The library gives partial credit; `strict` turns everything below 1.0 into 0.0. A response that
    did not end by itself gets 0.0. The part 'verifier' keeps what the library said.
    """

    def __init__(self, dataset: str, *, strict: bool = True) -> None:
        """Raises MissingDependency or InvalidArgument as `rollout.tasks.gym.make_dataset` does."""
        from rollout.tasks.gym import COMPACT, make_dataset

        options = COMPACT[dataset][1] if dataset in COMPACT else {}
        self._verifier = make_dataset(dataset, seed=0, options=options)
        self._strict = strict
        self.name = f"reasoning_gym:{dataset}" + ("" if strict else ":partial")
        self.version = package_version("reasoning-gym")

    def __call__(self, sample: ScoredSample) -> Reward:
        """Ask the library's `score_answer` about the response, against the recorded entry."""
        entry = sample.metadata.get("entry")
        if entry is None:
            raise InvalidArgument(
                explain(
                    f"scoring with {self.name}",
                    on=f"sample {sample.index}",
                    expected="metadata with the entry of the data set",
                    found=f"metadata with {sorted(sample.metadata)}",
                    do="use the prompt source reasoning_gym:<dataset> with this reward",
                )
            )
        score = float(self._verifier.score_answer(sample.response, entry))
        ended = sample.finish_reason == "stop"
        value = score if ended and (score == 1.0 or not self._strict) else 0.0
        return Reward(value=value, parts={"ended": float(ended), "verifier": score})


class CustomReward:
    """A function by import path: `f(sample)`, or slime's `async f(args, sample)`."""

    version = "custom"

    def __init__(self, path: str, args: Any) -> None:
        """Raises InvalidArgument where `path` names no function of one or two arguments."""
        self._function, self._args, self.name = load_object(path, what="reward"), args, path
        self._count = _count_arguments(self._function)
        if self._count not in (1, 2):
            raise InvalidArgument(
                explain(
                    "loading a custom reward",
                    on=path,
                    expected="f(sample) or f(args, sample)",
                    found=f"{self._count} arguments",
                )
            )

    def __call__(self, sample: ScoredSample) -> Reward:
        """Call it. A number or a `Reward` may come back, or an awaitable of one."""
        found = self._function(*((sample,) if self._count == 1 else (self._args, sample)))
        if inspect.isawaitable(found):
            found = asyncio.run(_resolve(found))
        if isinstance(found, Reward):
            return found
        if isinstance(found, (int, float, np.number)) and math.isfinite(float(found)):
            return Reward(value=float(found))
        raise InvalidArgument(
            explain(
                "scoring a sample",
                on=f"sample {sample.index} with {self.name}",
                expected="a finite number or a rollout.rewards.Reward",
                found=repr(found),
            )
        )


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def _count_arguments(function: Any) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return 0


def create_reward(name: str, *, args: Any = None, strict: bool = True) -> RewardFunction:
    """Make a reward by name or import path; `args` is handed to a custom one that wants it.

    Raises:
        InvalidArgument: no reward of that name.
        MissingDependency: the library behind it is not installed.
    """
    if name == "exact_line":
        return ExactLine()
    family, _, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        return GymReward(dataset, strict=strict)
    if is_import_path(name):
        return CustomReward(name, args)
    raise InvalidArgument(
        explain("making a reward", on=name, expected=f"one of {', '.join(REWARD_NAMES)}")
    )
