"""Measuring a weight version by whole episodes: turns, tools and all, nothing of it recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ledger.errors import EnvironmentFailed, InvalidArgument, LedgerError, RewardFailed, explain
from ledger.events import EvalScored
from ledger.fields import Event
from ledger.seeds import derive_seed
from rollout.episode import Episode, EpisodeFunction, EpisodeServices
from rollout.evaluation import EvaluationRun
from rollout.group_run import scored_sample
from rollout.protocol import AsyncEngine
from rollout.rewards import Reward, RewardFunction, ScoredSample
from rollout.trajectory import Trajectory

__all__ = ["evaluate_episodes", "judged_in"]

_log = logging.getLogger(__name__)
_AT_A_TIME = 64
"""Episodes that run together."""


class _Judged:
    """A reward function for what an environment gives no reward itself."""

    def __init__(self, reward: RewardFunction, environment: str) -> None:
        self._reward = reward
        self.name = f"{environment}, or {reward.name}"
        self.version = reward.version

    def __call__(self, sample: ScoredSample) -> Reward:
        return self._reward(sample)


def judged_in(run: EvaluationRun, drive: EpisodeFunction) -> EvaluationRun:
    """The evaluation under a name of its verifier that says what drives its episodes."""
    name = getattr(drive, "__name__", "episode")
    return dataclasses.replace(run, reward=_Judged(run.reward, name))


class _Nowhere:
    """An `Appender` that keeps nothing."""

    async def append(self, events: Sequence[Event]) -> None:
        return


async def evaluate_episodes(
    engine: AsyncEngine,
    run: EvaluationRun,
    drive: EpisodeFunction,
    tokenizer: Any,
    weight_version: int,
) -> EvalScored:
    """As `rollout.evaluation.evaluate`, each response being an episode that `drive` drives.

    Its reward is the driver's, else that of `run.reward`. NaN stands for an episode that failed.
    The recorded tokens of an episode are all that were sampled, siblings' too, in order of samples.

    Raises:
        EnvironmentFailed: all of them failed; the last failure is the cause.
    """
    began = time.perf_counter()
    rows = np.repeat(np.arange(run.n_prompts, dtype=np.int64), run.n_samples)
    free = itertools.count(len(rows))
    services = EpisodeServices(
        engine=engine,
        sink=_Nowhere(),
        tokenizer=tokenizer,
        params=run.params,
        run_id=f"evaluation {run.name}",
        branch=f"{weight_version}",
        run_seed=derive_seed("eval", run.seed),
        source=run.source.name,
        take_index=lambda: next(free),
        evaluation=True,
    )
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(index: int, row: int) -> tuple[float, Any, Exception | None]:
        async with places:
            episode = Episode(_begin(run, tokenizer, index, row), services)
            try:
                await drive(episode)
                reward = await _reward(run.reward, episode, tokenizer)
                return reward, _sampled(episode), None
            except Exception as error:
                if not _is_of_the_episode(error, episode):
                    raise
                _log.warning("an episode of evaluation %s failed: %s", run.name, error)
                return np.nan, _sampled(episode), error

    found = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows.tolist())))
    rewards = np.array([reward for reward, _, _ in found], np.float64)
    given = rewards[~np.isnan(rewards)]
    if not len(given):
        raise EnvironmentFailed(
            explain(
                "measuring a version by episodes",
                on=f"evaluation {run.name}, version {weight_version}",
                expected="episodes that come to their end",
                found=f"{len(found)} that failed, the last one so: {found[-1][2]}",
            )
        ) from found[-1][2]
    said = run.says_sampling
    return EvalScored(
        weight_version=weight_version,
        name=run.name,
        source=run.source.name,
        source_rows=rows,
        rewards=rewards,
        response_tokens=[tokens for _, tokens, _ in found],
        mean_reward=float(given.mean()),
        temperature=run.params.temperature,
        seed=run.seed,
        verifier=run.reward.name,
        eval_time_s=time.perf_counter() - began,
        top_p=run.params.top_p if said else None,
        top_k=run.params.top_k if said else None,
        max_new_tokens=run.params.max_new_tokens if said else None,
    )


def _is_of_the_episode(error: Exception, episode: Episode) -> bool:
    """Whether the others may come to their end all the same; as `rollout.group_run` sees it."""
    if isinstance(error, InvalidArgument):
        return bool(episode.trajectory.pieces)  # else no episode can begin with these settings
    return isinstance(error, (EnvironmentFailed, RewardFailed)) or not isinstance(
        error, LedgerError
    )


def _begin(run: EvaluationRun, tokenizer: Any, index: int, row: int) -> Trajectory:
    prompt = run.source.prompt(row)
    tokens = prompt.tokens
    if tokens is None:
        tokens = np.array(tokenizer.encode(prompt.text, add_special_tokens=False), np.int32)
    return Trajectory(
        index=index,
        group_index=row,
        rollout_id=index,
        rollout_step=0,
        prompt_tokens=tokens,
        text=prompt.text,
        label=prompt.label,
        metadata=dict(prompt.metadata or {}),
    )


async def _reward(reward: RewardFunction, episode: Episode, tokenizer: Any) -> float:
    if episode.reward is not None:
        return episode.reward.value
    sample = scored_sample(episode.trajectory, None, tokenizer, episode.services.params)
    ask: Callable[[ScoredSample], Reward] = reward
    return (await asyncio.to_thread(ask, sample)).value


def _sampled(episode: Episode) -> Any:
    """[n] All ids that were sampled in an episode and its siblings."""
    own = [one.tokens for one in episode.trajectory.segments]
    return np.concatenate(
        [np.zeros(0, np.int32), *own, *(_sampled(one) for one in episode.siblings)]
    )
