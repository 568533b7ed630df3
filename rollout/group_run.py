"""One group on its way: its episodes, until all are scored, one failed, or they were stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from ledger.errors import (
    EngineFailed,
    EnvironmentFailed,
    InvalidArgument,
    LedgerError,
    RewardFailed,
    explain,
)
from rollout.buffer import BufferedGroup, BufferedSample
from rollout.custom_reward import ask_rewards
from rollout.episode import Episode, EpisodeAborted, EpisodeFunction, EpisodeServices
from rollout.gate import GatedEngine
from rollout.protocol import SamplingParams
from rollout.records import Verifier, response_text, sample_scored
from rollout.rewards import Reward, RewardFunction, ScoredSample
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.sink import Appender
from rollout.trajectory import Trajectory

__all__ = ["GroupRun", "RunServices", "scored_sample"]

_EMPTY_ABORTS = 8
"""Aborts one after the other, which nobody asked for and which brought no token, before the engine
is taken to be broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """What all groups of a branch share."""

    episodes: EpisodeServices
    engine: GatedEngine
    sink: Appender
    drive: EpisodeFunction
    reward: RewardFunction
    executor: Executor
    """Runs reward functions, which may take long."""
    places: asyncio.Semaphore | None
    """Of samples on their way at a time; None: no limit."""
    greedy: SamplingParams
    baseline_key: str | None
    """Name of the part that holds the reward of the group's greedy sample; None: there is none."""
    n_samples: int
    """Samples of a group, a greedy one not counted."""

    @classmethod
    def of(
        cls,
        episodes: EpisodeServices,
        engine: GatedEngine,
        drive: EpisodeFunction,
        reward: RewardFunction,
        executor: Executor,
        settings: RolloutSettings,
        shape: RolloutShape,
    ) -> RunServices:
        """From the settings; to be called in the event loop."""
        limit = shape.async_max_concurrent_samples
        return cls(
            episodes=episodes,
            engine=engine,
            sink=episodes.sink,
            drive=drive,
            reward=reward,
            executor=executor,
            places=None if limit is None else asyncio.Semaphore(limit),
            greedy=replace(episodes.params, temperature=0.0, top_p=1.0, top_k=-1),
            baseline_key=settings.greedy_baseline_key,
            n_samples=settings.n_samples_per_prompt,
        )


@dataclass(frozen=True, slots=True)
class _Driver:
    """The verifier of a reward that the driver of the episode gave itself."""

    name: str
    version: str


class GroupRun:
    """Drives the samples of one group. `outcome` says how it ended."""

    def __init__(self, group: BufferedGroup, services: RunServices) -> None:
        """`group` may have pieces, or scores, already."""
        self.group, self.services = group, services
        self.outcome = "running"
        """'running', 'scored', 'failed' or 'stopped'."""
        self.failed: dict[int, str] = {}
        """Sample → why it failed."""
        self.is_scoring = False
        """Whether generation has ended, and the rewards are being found."""
        self._stopping = False
        self._ended: set[int] = set()
        self._episodes: dict[int, Episode] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Drive every sample to its end, and score them together.

        Returns with `outcome` set. Raises what stops the whole rollout: what the ledger says, a
        reward function that fails, a request that the model cannot take at all.
        """
        try:
            first = [s for s in self.group.samples.values() if s.trajectory.parent_index is None]
            self._tasks = [asyncio.create_task(self._sample(sample)) for sample in first]
            await self._until_ended()
            if self.failed:
                self.outcome = "failed"
            elif self._stopping:
                self.outcome = "stopped"
            else:
                self.is_scoring = True
                await self._score()
                self.outcome = "failed" if self.failed else "scored"
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._settle()

    @property
    def is_whole(self) -> bool:
        """Whether every episode came to its end: only the rewards may be missing."""
        first = (i for i, s in self.group.samples.items() if s.trajectory.parent_index is None)
        return self.group.is_scored or all(index in self._ended for index in first)

    async def stop(self, grace_s: float) -> None:
        """End the episodes where they stand, all they have recorded; `run` then returns.

        A driver that is not at the engine has `grace_s` seconds to notice, then it is cancelled.
        """
        self._stopping = True
        await asyncio.gather(*(episode.abort() for episode in list(self._episodes.values())))
        running = [task for task in self._tasks if not task.done()]
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()

    async def _until_ended(self) -> None:
        running = set(self._tasks)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if self.failed and running and not self._stopping:
                # The group is lost: what the others would still generate is for nothing.
                await self.stop(0.0)

    async def _sample(self, sample: BufferedSample) -> None:
        """Drive one sample to its end; a failure is noted, not raised."""
        places = self.services.places
        if places is None:
            await self._drive(sample.trajectory)
            return
        async with places:
            await self._drive(sample.trajectory)

    async def _drive(self, at: Trajectory) -> None:
        empty = 0
        while not self._stopping:
            before = at.response_length
            episode = self._episode(at)
            self._episodes[at.index] = episode
            try:
                await self.services.drive(episode)
                self._ended.add(at.index)
                return
            except EpisodeAborted:
                # Not by us: the engine took new weights. It goes on under them.
                empty = 0 if at.response_length > before else empty + 1
                if empty >= _EMPTY_ABORTS and not self._stopping:
                    self.failed[at.index] = f"{empty} aborts that nobody asked for"
                    return
                await self.services.engine.opened()
            except (EngineFailed, EnvironmentFailed, RewardFailed) as error:
                self._fail(at.index, error)
                return
            except InvalidArgument as error:
                if not at.pieces:
                    raise  # no sample can be taken with these settings
                self._fail(at.index, error)
                return
            except LedgerError:
                raise
            except Exception as error:
                self._fail(at.index, error)
                return

    def _fail(self, index: int, error: Exception) -> None:
        if not self._stopping:
            self.failed[index] = _short(error)

    def _episode(self, at: Trajectory) -> Episode:
        shared = self.services.episodes
        if self._is_baseline(at.index):
            shared = replace(shared, params=self.services.greedy)
        return self._with_siblings(at, shared)

    def _with_siblings(self, at: Trajectory, shared: EpisodeServices) -> Episode:
        episode = Episode(at, shared)
        episode.siblings = [
            self._with_siblings(one.trajectory, shared)
            for one in self.group.samples.values()
            if one.trajectory.parent_index == at.index
        ]
        return episode

    def _is_baseline(self, index: int) -> bool:
        if self.services.baseline_key is None:
            return False
        first = [i for i, s in self.group.samples.items() if s.trajectory.parent_index is None]
        return len(first) > self.services.n_samples and index == first[-1]

    @property
    def baseline(self) -> int | None:
        """The group's greedy sample; None where there is none."""
        return next((index for index in self.group.samples if self._is_baseline(index)), None)

    async def _settle(self) -> None:
        """Wait for what was being recorded; the buffer gets the trajectories of siblings."""
        for episode in _all(self._episodes.values()):
            await episode.settle()
            sample = self.group.samples.get(episode.trajectory.index)
            if sample is not None:
                sample.trajectory = episode.trajectory

    async def _score(self) -> None:
        """Find the reward of every execution, and record them together.

        The siblings of an execution share its reward; the greedy sample's becomes a part of those
        of the others.
        """
        await self._settle()
        rewards: dict[int, tuple[Reward, Verifier]] = {}
        missing = [
            sample
            for index, sample in self.group.samples.items()
            if sample.reward is None and sample.trajectory.parent_index is None
        ]
        asked = []
        for at in (sample.trajectory for sample in missing):
            episode = self._episodes.get(at.index)
            if episode is not None and episode.reward is not None:
                drive = self.services.drive
                driver = _Driver(
                    getattr(drive, "__name__", "episode"), getattr(drive, "version", "episode")
                )
                rewards[at.rollout_id] = episode.reward, driver
            else:
                asked.append(at)
        verifier = self.services.reward
        found = await ask_rewards(
            verifier, [self.scored(self._spoken(at)) for at in asked], self.services.executor
        )
        for at, one in zip(asked, found, strict=True):
            if isinstance(one, Reward):
                rewards[at.rollout_id] = one, verifier
            else:
                self.failed[at.index] = _short(one)
        if self.failed:
            return
        key, baseline = self.services.baseline_key, self.baseline
        parts: dict[str, float] = {}
        if key is not None and baseline is not None:
            given = self.group.samples[baseline].reward
            parts[key] = rewards[baseline][0].value if given is None else given
        events = []
        for index, sample in self.group.samples.items():
            at = sample.trajectory
            if sample.reward is not None or at.rollout_id not in rewards:
                continue
            reward, judge = rewards[at.rollout_id]
            if index != baseline:
                reward = replace(reward, parts={**reward.parts, **parts})
            events.append(sample_scored(self.scored(at), reward, judge))
        await self.services.sink.append(events)

    def _spoken(self, at: Trajectory) -> Trajectory:
        """What is judged of an execution: its first sample, or, where that one says nothing (its
        agent asked in its own words), the first one that does."""
        spoken = (
            one.trajectory
            for one in self.group.samples.values()
            if one.trajectory.rollout_id == at.rollout_id and one.trajectory.sampled_tokens
        )
        return next(spoken, at)

    def scored(self, at: Trajectory) -> ScoredSample:
        """A sample as rewards and filters see it."""
        sample = self.group.samples[at.index]
        return scored_sample(
            at, sample.reward, self.services.episodes.tokenizer, self.services.episodes.params
        )


def scored_sample(
    at: Trajectory, reward: float | None, tokenizer: Any, params: SamplingParams
) -> ScoredSample:
    """A sample as rewards and filters see it."""
    finish_reason = at.finish_reason or "abort"
    return ScoredSample(
        index=at.index,
        group_index=at.group_index,
        rollout_id=at.rollout_id,
        prompt=at.text,
        response=response_text(tokenizer, at.response(), finish_reason, params.stop_token_ids)
        if at.pieces
        else "",
        tokens=at.context(),
        response_length=at.response_length,
        label=at.label,
        metadata=at.metadata,
        finish_reason=finish_reason,
        reward=reward,
        trajectory=at,
    )


def _short(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _all(episodes: Any) -> Sequence[Episode]:
    """Episodes with all that were begun in them."""
    found: list[Episode] = []
    for episode in episodes:
        found.append(episode)
        found += _all(episode.siblings)
    return found


def all_failed(count: int, last: str) -> EngineFailed:
    """The error of a rollout in which nothing but failures came."""
    return EngineFailed(
        explain(
            "gathering groups for a rollout step",
            expected="samples that come to their end",
            found=f"the last {count} groups all failed; the last one: {last}",
            do='see them: ledger sql "select reason, count(*) from decisions where decision = '
            "'failed' group by all\". Start the command again when the cause is gone",
        )
    )
