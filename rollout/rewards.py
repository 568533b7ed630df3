"""Rewards: a sample in, a number with its parts out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from rollout.imports import IMPORT_PATH, is_import_path

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

__all__ = [
    "REWARD_NAMES",
    "Reward",
    "RewardFunction",
    "ScoredSample",
    "checked_reward",
    "create_reward",
]

REWARD_NAMES = (
    "exact_line",
    "reasoning_gym:<dataset>",
    "math",
    "boxed_math",
    "f1",
    "boxed_f1",
    "remote_rm",
    IMPORT_PATH,
)


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
    trajectory: Trajectory | None = None
    """Its pieces, where it may have several; None: all of the response was sampled at once."""

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
        """Score `sample`. Any thread may call it.

        Raises:
            RewardFailed: it has no reward for this sample, which therefore failed.
            InvalidArgument: it cannot work at all.
        """


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


def checked_reward(found: object, *, on: str) -> Reward:
    """`found`, a number or a `Reward`, as a `Reward` of plain finite floats.

    Numbers of numpy, and of whatever else becomes one float, are taken. `on` says in the message
    which reward it was, of which sample. Raises InvalidArgument for anything else, a NaN included.
    """
    if not isinstance(found, Reward):
        return Reward(value=_number(found, on, "a finite number or a rollout.rewards.Reward"))
    value = _number(found.value, on, "a Reward whose value is a finite number")
    if not isinstance(found.parts, Mapping) or not all(isinstance(k, str) for k in found.parts):
        raise _not_a_reward(on, "a Reward whose parts are a mapping of names", repr(found.parts))
    parts = {
        name: _number(part, f"{on}, part {name!r}", "a finite number")
        for name, part in found.parts.items()
    }
    return Reward(value=value, parts=parts)


def _number(found: object, on: str, expected: str) -> float:
    try:
        # Texts have no __float__: "1.0" is not taken for a number.
        number = float(found) if hasattr(type(found), "__float__") else math.nan  # type: ignore[arg-type]
    except Exception as error:
        raise _not_a_reward(on, expected, repr(found)) from error
    if not math.isfinite(number):
        raise _not_a_reward(on, expected, repr(found))
    return number


def _not_a_reward(on: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(explain("scoring a sample", on=on, expected=expected, found=found))


def create_reward(
    name: str,
    *,
    args: Any = None,
    strict: bool = True,
    limit_s: float = 10.0,
    url: str | None = None,
) -> RewardFunction:
    """Make a reward by name or import path; `args` is handed to a custom one that wants it.

    `limit_s` is the time that a verifier in a process of its own has for a sample, `url` the
    address of a reward server.

    Raises:
        InvalidArgument: no reward of that name.
        MissingDependency: the library behind it is not installed.
    """
    from rollout.custom_reward import CustomReward
    from rollout.verifiers import create_reward_type

    if name == "exact_line":
        return ExactLine()
    family, _, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        return GymReward(dataset, strict=strict)
    if is_import_path(name):
        return CustomReward(name, args)
    by_type = create_reward_type(name, limit_s=limit_s, url=url)
    if by_type is not None:
        return by_type
    raise InvalidArgument(
        explain(
            "making a reward",
            on="--rm-type or --custom-rm-path",
            expected=f"one of {', '.join(REWARD_NAMES)}",
            found=repr(name),
        )
    )
