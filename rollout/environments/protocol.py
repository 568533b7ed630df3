"""What an environment is: it answers what a model says, until the episode ends.

An environment sees text (and the ids, where it wants them); how its answers become tokens is the
business of `rollout.environments.turns`. One environment serves one episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentTask",
    "Message",
    "StepResult",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentTask:
    """What an episode is about."""

    prompt: str
    """As text."""
    label: str | None
    """What the verifier compares with."""
    metadata: Mapping[str, Any]
    """What the prompt's source gave besides."""
    seed: int
    """For what the environment draws: a function of the run's seed and the sample's place. An
    episode that is resumed gets the same one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action:
    """What the model said in a turn."""

    turn: int
    """From 0."""
    text: str
    """Without the stop token that ended it."""
    tokens: npt.NDArray[np.int32]
    """[n] As sampled."""
    finish_reason: str
    """'stop', or 'length': it was cut at a limit, and is no whole turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the model is told next."""

    text: str
    role: str = "user"
    """'user', 'tool' or 'system', for a chat template."""
    source: str = "environment"
    """What is recorded: 'environment', 'tool', 'user' or 'system'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of an action. It ends the episode (`done` or `truncated`), or has messages.

    Messages of a step that ends the episode are not added: the model says nothing to them.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    """Of this step; the rollout's reward is their sum. None in every step: the reward function of
    the rollout is asked, about the whole response."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """By name, added up over the steps."""
    done: bool = False
    """The task is over."""
    truncated: bool = False
    """The environment gives up: it was too long."""


class Environment(Protocol):
    """One episode's world. Methods may be plain (each environment then has a thread) or `async`.

    What it does must be a function of the task and the actions: an episode that was cut is driven
    again with the recorded actions, and each answer is compared with the recorded one. An
    environment that cannot promise that may have a method

        resume(task: EnvironmentTask, history: Sequence[tuple[Action, StepResult]]) -> None

    besides, which is called in place of `reset` and of the recorded steps; the messages in the
    history are the recorded ones, without rewards. Where it is there, rewards must come in the
    last step alone.
    """

    name: str
    version: str

    def reset(self, task: EnvironmentTask) -> Any:
        """Begin. Returns None, or a `Message` to be added behind the prompt."""

    def step(self, action: Action) -> Any:
        """Answer: a `StepResult`."""

    def close(self) -> Any:
        """Free everything. It is called once, however the episode ended."""


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode, at once: what takes long belongs into `reset`."""
