"""slime's sample hooks: functions that see each sample when its generation has ended."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from rollout.episode import Episode, EpisodeFunction
from rollout.imports import load_function
from rollout.rewards import Reward
from rollout.slime.arguments import SlimeArguments
from rollout.slime.convert import sample_of

__all__ = ["HookFailed", "HookedEpisode", "SampleHooks"]

_SETTING = "--rollout-sample-hook-path"


class HookFailed(Exception):
    """A hook returned no sample, or changed what is recorded already: its sample failed."""


class SampleHooks:
    """One after another `(args, sample, *, rollout_id=None, evaluation=False) -> Sample | None`."""

    def __init__(self, paths: Sequence[str], arguments: SlimeArguments) -> None:
        """Raises InvalidArgument where a path names no function."""
        self._hooks = [(path, load_function(path, setting=_SETTING)) for path in paths]
        self._arguments = arguments

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def apply(
        self, sample: Any, rollout_step: int | None = None, *, evaluation: bool = False
    ) -> Any:
        """The sample that the last hook leaves. Raises HookFailed, or what a hook raised."""
        for path, hook in self._hooks:
            given = {"rollout_id": rollout_step, "evaluation": evaluation}
            parameters = inspect.signature(hook).parameters
            if all(one.kind != one.VAR_KEYWORD for one in parameters.values()):
                given = {name: value for name, value in given.items() if name in parameters}
            found = hook(self._arguments, sample, **given)
            if inspect.isawaitable(found):
                found = await found
            if found is not None:
                if not hasattr(found, "tokens"):
                    raise HookFailed(f"{_SETTING} {path} returned {type(found).__name__}")
                sample = found
        return sample


class HookedEpisode:
    """An episode function with hooks behind it, which may set the reward and the metadata."""

    def __init__(self, drive: EpisodeFunction, hooks: SampleHooks) -> None:
        self._drive, self._hooks = drive, hooks
        self.__name__ = getattr(drive, "__name__", "episode")

    async def close(self) -> None:
        """As the driver's, where it has one."""
        closing = getattr(self._drive, "close", None)
        if closing is not None:
            await closing()

    async def __call__(self, episode: Episode) -> None:
        """Drive, then show the sample. Raises HookFailed where a hook changed its tokens."""
        await self._drive(episode)
        at = episode.trajectory
        text = episode.response_text(at.response(), at.finish_reason or "stop") if at.pieces else ""
        reward = None if episode.reward is None else episode.reward.value
        before = sample_of(at, text, reward)
        recorded = list(before.tokens), list(before.loss_mask or ())
        after = await self._hooks.apply(
            before, at.rollout_step, evaluation=episode.services.evaluation
        )
        if (list(after.tokens), list(after.loss_mask or ())) != recorded:
            raise HookFailed("a sample hook changed tokens or loss_mask, which are recorded")
        if after.reward is not None and after.reward != reward:
            parts = {} if episode.reward is None else episode.reward.parts
            episode.reward = Reward(value=after.reward, parts=parts)
        at.metadata = after.metadata
