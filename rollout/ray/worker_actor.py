"""Episodes and rewards in an actor of its own, which writes what it makes itself.

Its producer is its own: whoever takes over the samples of a worker that is gone begins an epoch of
that producer first, and what the gone one might still send is refused.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ledger.errors import EnvironmentFailed, LedgerError, RewardFailed
from ledger.events import PromptIssued
from ledger.fields import Event
from ledger.opening import open_ledger
from rollout.custom_reward import ask_rewards
from rollout.episode import Episode, EpisodeAborted, EpisodeFunction, EpisodeServices
from rollout.imports import load_function
from rollout.protocol import SamplingParams
from rollout.ray.engines import RayEngines
from rollout.rewards import Reward, RewardFunction, ScoredSample
from rollout.sink import EventSink
from rollout.trajectory import Trajectory

__all__ = [
    "Assignment",
    "Driven",
    "WorkerActor",
    "WorkerPlace",
    "WorkerServices",
    "all_episodes",
    "producer_of",
    "with_siblings",
]

_JUDGES = 8
"""Reward functions that run at a time in a worker."""


def producer_of(branch: str, worker: str) -> str:
    """Name under which a worker writes."""
    return f"ledger-rollout/{branch}/{worker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker writes, and what it asks."""

    ledger: str
    catalog: str | None
    run_id: str
    branch: str
    worker: str
    engines: Mapping[str, Any]
    """Name → handle of an `EngineActor`."""
    engine_name: str
    engine_version: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """A sample to drive to its end, with the siblings that are recorded of it."""

    trajectory: Trajectory
    siblings: Sequence[Trajectory]
    params: SamplingParams
    spare_indices: Sequence[int]
    """Numbers for siblings that it begins."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Driven:
    """How it ended; everything in it is durable."""

    trajectory: Trajectory
    siblings: Sequence[Trajectory]
    issued: Sequence[PromptIssued]
    """The events of those siblings that were begun now."""
    used_indices: int
    """How many of the spare numbers were given."""
    reward: Reward | None
    """What the driver itself says."""
    error: Exception | None
    """What the driver raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerServices:
    """What `load` of a worker makes: how episodes are driven, and judged."""

    tokenizer: Any
    drive: EpisodeFunction
    reward: RewardFunction
    run_seed: int
    source: str


class WorkerActor:
    """What runs in the actor. Ray starts it anew where it dies."""

    def __init__(
        self,
        place: WorkerPlace,
        factory: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        """`factory` is the import path of a function that makes `WorkerServices` of `arguments`.

        Begins an epoch of its own producer: what it wrote before it was started anew ends there.
        """
        os.environ.update(environment)
        self._place = place
        self._made: WorkerServices = load_function(factory, setting="--layout")(**arguments)
        self._ledger = open_ledger(place.ledger, catalog=place.catalog)
        self._writer = self._ledger.writer(
            place.run_id, place.branch, producer=producer_of(place.branch, place.worker)
        )
        self._sink: EventSink | None = None
        self._engines: RayEngines | None = None
        self._episodes: dict[int, Episode] = {}
        self._judges = ThreadPoolExecutor(_JUDGES, thread_name_prefix="reward")

    def _services(
        self, assignment: Assignment, spare: list[int], issued: list[PromptIssued]
    ) -> EpisodeServices:
        # Both belong to the event loop, which runs only now.
        if self._sink is None:
            self._sink = EventSink(self._writer.append)
        if self._engines is None:
            self._engines = RayEngines(
                self._place.engines,
                name=self._place.engine_name,
                version=self._place.engine_version,
            )

        def take_index() -> int:
            if not spare:
                raise EnvironmentFailed("an episode began more siblings than a worker may number")
            return spare.pop(0)

        return EpisodeServices(
            engine=self._engines,
            sink=_Noting(self._sink, issued),
            tokenizer=self._made.tokenizer,
            params=assignment.params,
            run_id=self._place.run_id,
            branch=self._place.branch,
            run_seed=self._made.run_seed,
            source=self._made.source,
            take_index=take_index,
        )

    async def ready(self) -> int:
        """Its process, once everything is loaded."""
        return os.getpid()

    async def drive(self, assignment: Assignment) -> Driven:
        """Drive a sample to its end. What the driver raises is in the answer."""
        spare = list(assignment.spare_indices)
        issued: list[PromptIssued] = []
        services = self._services(assignment, spare, issued)
        episode = with_siblings(assignment.trajectory, assignment.siblings, services)
        index = assignment.trajectory.index
        self._episodes[index] = episode
        error: Exception | None = None
        try:
            await self._made.drive(episode)
        except Exception as raised:
            error = _portable(raised)
        finally:
            del self._episodes[index]
            for one in all_episodes(episode):
                await one.settle()
        return Driven(
            trajectory=episode.trajectory,
            siblings=[one.trajectory for one in all_episodes(episode)[1:]],
            issued=issued,
            used_indices=len(assignment.spare_indices) - len(spare),
            reward=episode.reward,
            error=error,
        )

    async def abort(self, index: int) -> None:
        """Stop the episode of a sample: `drive` then answers with what it has."""
        if index in self._episodes:
            await self._episodes[index].abort()

    async def judge(self, samples: Sequence[ScoredSample]) -> list[Reward | RewardFailed]:
        """The rewards of the samples of a group, as `ask_rewards` gives them, or raises."""
        return await ask_rewards(self._made.reward, samples, self._judges)


class _Noting:
    """An `Appender` that notes the prompts which it has stored."""

    def __init__(self, sink: EventSink, issued: list[PromptIssued]) -> None:
        self._sink, self._issued = sink, issued

    async def append(self, events: Sequence[Event]) -> None:
        """As `Appender.append`."""
        await self._sink.append(events)
        self._issued += [event for event in events if isinstance(event, PromptIssued)]


def with_siblings(
    at: Trajectory, siblings: Sequence[Trajectory], services: EpisodeServices
) -> Episode:
    """The episode of a sample that goes on, with those that are recorded of it."""
    episode = Episode(at, services)
    episode.siblings = [
        with_siblings(one, siblings, services) for one in siblings if one.parent_index == at.index
    ]
    return episode


def all_episodes(episode: Episode) -> list[Episode]:
    """An episode, and all that were begun in it."""
    found = [episode]
    for one in episode.siblings:
        found += all_episodes(one)
    return found


def _portable(error: Exception) -> Exception:
    """The error as another process can have it."""
    if isinstance(error, (LedgerError, EpisodeAborted)):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EnvironmentFailed(f"{type(error).__name__}: {error}")
    return error
