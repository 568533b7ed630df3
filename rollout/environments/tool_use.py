"""Environments in which the model asks tools, and then answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollout.environments.judging import judge
from rollout.environments.protocol import Action, EnvironmentTask, Message, StepResult
from rollout.rewards import RewardFunction
from rollout.tools.parsing import ParsedAnswer
from rollout.tools.tool import Tool, ToolBox

__all__ = ["ToolEnvironment"]


class ToolEnvironment:
    """A turn with calls is answered by the tools; one without ends the episode.

    Its words are then judged by `reward`, or, without one, the whole response by the rollout's
    reward function. Parts: `calls`, and `bad_calls` that could not be read. A tool that is broken
    (it raises) fails the episode; calls that make no sense are told to the model.

    The tools keep nothing between calls, so an episode that was cut goes on without asking them
    again.
    """

    roles = ("tool",)
    version = "1"

    def __init__(
        self,
        name: str,
        tools: Sequence[Tool],
        parse: Callable[[str], ParsedAnswer],
        *,
        reward: RewardFunction | None = None,
        wrap: str = "{text}",
    ) -> None:
        """`wrap` is put around each answer of a tool, in place of `{text}`."""
        self.name = name
        self._box, self._parse = ToolBox(tools), parse
        self._judge, self._wrap = reward, wrap
        self._task: EnvironmentTask | None = None
        self._calls = self._bad = 0

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return self._box.schemas

    def reset(self, task: EnvironmentTask) -> None:
        """The prompt has all that is to be said."""
        self._task = task

    async def step(self, action: Action) -> StepResult:
        """Answer the calls, or judge the answer. Raises what a tool, or the reward, raises."""
        if action.finish_reason == "stop" and (parsed := self._read(action)):
            answers = await self._box.answer(parsed)
            return StepResult(
                messages=[
                    Message(text=self._wrap.replace("{text}", one.text), role="tool", source="tool")
                    for one in answers
                ]
            )
        return await self._ended(action)

    def resume(self, task: EnvironmentTask, history: Sequence[tuple[Action, StepResult]]) -> None:
        """Go on behind recorded turns, without asking the tools again."""
        self._task = task
        for action, _ in history:
            self._read(action)

    def _read(self, action: Action) -> ParsedAnswer | None:
        """What a turn asks for; None where it asks for nothing."""
        parsed = self._parse(action.text)
        self._calls += len(parsed.calls)
        self._bad += len(parsed.problems)
        return parsed if parsed.calls or parsed.problems else None

    async def _ended(self, action: Action) -> StepResult:
        if self._task is None:
            raise RuntimeError("step() before reset()")
        parts = {"calls": float(self._calls), "bad_calls": float(self._bad)}
        if self._judge is None:
            return StepResult(done=True, parts=parts)
        found = await asyncio.to_thread(judge, self._judge, self._task, action)
        return StepResult(done=True, reward=found.value, parts={**found.parts, **parts})

    def close(self) -> None:
        """Nothing to free."""
