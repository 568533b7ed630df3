"""Reward functions by import path: `f(sample)`, or slime's `async f(args, sample)`.

The first gets a `ScoredSample`, the second slime's `Sample`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from ledger.errors import InvalidArgument, LedgerError, RewardFailed, explain
from rollout.imports import load_function
from rollout.rewards import Reward, RewardFunction, ScoredSample, checked_reward
from rollout.slime.convert import scored_as_slime

__all__ = ["CustomReward", "CustomRewards", "ask_rewards", "rewards_of"]

_SETTING = "--custom-rm-path"


class _Loaded:
    """A function of one argument, or of slime's `args` and one."""

    version = "custom"

    def __init__(self, path: str, args: Any, reward_key: str | None, *, of: str) -> None:
        """Raises InvalidArgument where `path` names no function of one or two arguments."""
        self.name, self._args, self._key = path, args, reward_key
        self._function = load_function(path, setting=_SETTING)
        self._count = _count_arguments(self._function)
        if self._count not in (1, 2):
            raise InvalidArgument(
                explain(
                    "loading a custom reward",
                    on=f"{_SETTING} {path}",
                    expected=f"f({of}) or f(args, {of})",
                    found="a signature that cannot be read"
                    if self._count is None
                    else f"a function of {self._count} arguments",
                )
            )

    def _call(self, given: ScoredSample | list[ScoredSample]) -> Any:
        if self._count == 1:
            return self._function(given)
        if isinstance(given, list):
            return self._function(self._args, [scored_as_slime(one) for one in given])
        return self._function(self._args, scored_as_slime(given))

    def _on(self, sample: ScoredSample) -> str:
        return f"{_SETTING} {self.name}, sample {sample.index}"

    def _failed(self, error: Exception, on: str) -> Exception:
        if isinstance(error, LedgerError):
            return error
        return RewardFailed(
            explain(
                "scoring a sample",
                on=on,
                expected="a finite number or a rollout.rewards.Reward",
                found=f"{type(error).__name__}: {error}",
            )
        )

    def _reward(self, found: object, sample: ScoredSample) -> Reward:
        if isinstance(found, Mapping):
            found = _keyed(found, self._key, self._on(sample))
        return checked_reward(found, on=self._on(sample))


class CustomReward(_Loaded):
    """A function of one sample."""

    def __init__(self, path: str, args: Any, reward_key: str | None = None) -> None:
        """`reward_key` picks the reward where a dictionary comes back; the rest are its parts.

        Raises InvalidArgument where `path` names no function of one or two arguments.
        """
        super().__init__(path, args, reward_key, of="sample")

    def __call__(self, sample: ScoredSample) -> Reward:
        """Call it. A number or a `Reward` may come back, or an awaitable of one.

        Raises:
            RewardFailed: it raised; its exception is the cause.
            InvalidArgument: anything else came back.
        """
        try:
            found = self._call(sample)
            if inspect.isawaitable(found):
                found = asyncio.run(_resolve(found))
        except Exception as error:
            raise self._failed(error, self._on(sample)) from error
        return self._reward(found, sample)

    async def ask(self, samples: Sequence[ScoredSample], executor: Executor) -> list[Any]:
        """Rewards of samples, or the RewardFailed of each that has none.

        Coroutines run in this event loop, so that they may keep connections; other functions in
        `executor`.
        """
        if not inspect.iscoroutinefunction(self._function):
            return await _in_threads(self, samples, executor)
        return list(await asyncio.gather(*(self._asked(sample) for sample in samples)))

    async def _asked(self, sample: ScoredSample) -> Reward | RewardFailed:
        try:
            found = await self._call(sample)
        except Exception as error:
            failed = self._failed(error, self._on(sample))
            if not isinstance(failed, RewardFailed):
                raise
            failed.__cause__ = error
            return failed
        return self._reward(found, sample)


class CustomRewards(_Loaded):
    """A function of all samples of a group at once, as slime's --group-rm has it."""

    def __init__(self, path: str, args: Any, reward_key: str | None = None) -> None:
        """As `CustomReward`."""
        super().__init__(path, args, reward_key, of="samples")

    def __call__(self, sample: ScoredSample) -> Reward:
        """Score a sample that is alone. Raises as `CustomReward`."""
        (reward,) = self.of_group([sample])
        return reward

    def of_group(self, samples: Sequence[ScoredSample]) -> list[Reward]:
        """Rewards of the samples, in order.

        Raises:
            RewardFailed: it raised; its exception is the cause.
            InvalidArgument: something else than a number for each came back.
        """
        try:
            found = self._call(list(samples))
            if inspect.isawaitable(found):
                found = asyncio.run(_resolve(found))
        except Exception as error:
            raise self._failed(error, self._on(samples[0])) from error
        return self._rewards(found, samples)

    async def ask(self, samples: Sequence[ScoredSample], executor: Executor) -> list[Any]:
        """As `CustomReward.ask`: where the function raises, every sample failed."""
        try:
            if inspect.iscoroutinefunction(self._function):
                found = await self._call(list(samples))
            else:
                loop = asyncio.get_running_loop()
                return list(await loop.run_in_executor(executor, self.of_group, samples))
        except Exception as error:
            failed = self._failed(error, self._on(samples[0]))
            if not isinstance(failed, RewardFailed):
                raise
            failed.__cause__ = error
            return [failed] * len(samples)
        return self._rewards(found, samples)

    def _rewards(self, found: Any, samples: Sequence[ScoredSample]) -> list[Reward]:
        found = list(found) if hasattr(found, "__iter__") else found
        if not isinstance(found, list) or len(found) != len(samples):
            raise InvalidArgument(
                explain(
                    "scoring a group",
                    on=f"{_SETTING} {self.name}, group {samples[0].group_index}",
                    expected=f"a reward for each of {len(samples)} samples (--group-rm)",
                    found=f"{found!r}"[:200],
                )
            )
        return [self._reward(one, sample) for one, sample in zip(found, samples, strict=True)]


def rewards_of(
    reward: RewardFunction, samples: Sequence[ScoredSample]
) -> tuple[dict[int, Reward], dict[int, RewardFailed]]:
    """By index of the samples of one group: the reward, or why there is none.

    Raises what is no failure of one sample: InvalidArgument above all.
    """
    found: dict[int, Reward] = {}
    failed: dict[int, RewardFailed] = {}
    if isinstance(reward, CustomRewards) and samples:
        try:
            rewards = reward.of_group(samples)
        except RewardFailed as error:
            return {}, {sample.index: error for sample in samples}
        return {s.index: r for s, r in zip(samples, rewards, strict=True)}, {}
    for sample in samples:
        try:
            found[sample.index] = reward(sample)
        except RewardFailed as error:
            failed[sample.index] = error
    return found, failed


async def ask_rewards(
    reward: RewardFunction, samples: Sequence[ScoredSample], executor: Executor
) -> list[Reward | RewardFailed]:
    """The reward of each sample of a group, or why it has none; `executor` runs what blocks.

    Raises what is no failure of one sample: InvalidArgument above all.
    """
    asking = getattr(reward, "ask", None)
    if asking is not None:
        found: list[Reward | RewardFailed] = await asking(samples, executor)
        return found
    return await _in_threads(reward, samples, executor)


async def _in_threads(
    reward: RewardFunction, samples: Sequence[ScoredSample], executor: Executor
) -> list[Reward | RewardFailed]:
    loop = asyncio.get_running_loop()
    asked = (loop.run_in_executor(executor, reward, sample) for sample in samples)
    found = await asyncio.gather(*asked, return_exceptions=True)
    for one in found:
        if not isinstance(one, (Reward, RewardFailed)):
            raise one
    return [one for one in found if isinstance(one, (Reward, RewardFailed))]


def _keyed(found: Mapping[str, Any], key: str | None, on: str) -> Reward:
    """A dictionary as a reward: the entry `key` is it, the other numbers are its parts."""
    if key is None or key not in found:
        raise InvalidArgument(
            explain(
                "scoring a sample",
                on=on,
                expected="a number; of a dictionary, --reward-key says which entry it is"
                if key is None
                else f"a dictionary with {key!r} (--reward-key)",
                found=f"a dictionary with {', '.join(sorted(map(str, found)))}",
            )
        )
    parts = {
        str(name): float(value)
        for name, value in found.items()
        if name != key and isinstance(value, (int, float))
    }
    return replace(checked_reward(found[key], on=on), parts=parts)


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def _count_arguments(function: Any) -> int | None:
    """Arguments that have to be given; None where that cannot be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in variable for p in parameters)
