"""Worker actors as a driver of episodes and a judge: what one that dies had, another goes on with.

A worker that is gone is fenced before anybody looks at what it has recorded: what is read then is
all that will ever come of it, and a late duplicate is refused. Only then its samples go to others,
with the pieces they have, and a new actor takes its name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from ledger.encode import events_of
from ledger.errors import EnvironmentFailed, RewardFailed, explain
from ledger.events import PromptIssued
from rollout.buffer import DataBuffer
from rollout.buffer_reading import read_trajectories
from rollout.episode import Episode
from rollout.ray.worker_actor import Assignment, Driven, all_episodes, producer_of, with_siblings
from rollout.rewards import Reward, RewardFunction, ScoredSample
from rollout.trajectory import Trajectory, trajectory_of

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["RayWorkers"]

_SPARE = 16
"""Numbers for siblings that go along with a sample."""
_CANCEL_S = 10.0
"""How long a worker may take to stop a sample, before it is taken to be stuck, and ended."""


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    actor: Any
    samples: int = 0
    """That it drives now."""
    gone: asyncio.Task[None] | None = None
    """Fences it, once it is gone."""


@dataclass(slots=True, eq=False)
class RayWorkers:
    """Where samples are driven and judged. All calls come from one event loop."""

    ledger: Ledger
    run_id: str
    branch: str
    start: Callable[[str], Any]
    """Name → handle of a new `WorkerActor` of that name."""
    reward: RewardFunction
    """The one that the workers have: its name and version are recorded."""
    buffer: DataBuffer | None = None
    """The coordinator's; it must be set before the first sample is driven."""
    spares: int = _SPARE
    replaced: int = 0
    """Workers that were gone, and started anew."""
    name: str = ""
    """Of the reward."""
    version: str = ""
    """Of the reward."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _there: asyncio.Condition = field(default_factory=asyncio.Condition)
    _pool: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """As a `RewardFunction` it is the workers'."""
        self.name, self.version = self.reward.name, self.reward.version

    def add(self, names: Sequence[str]) -> None:
        """Start workers."""
        for name in names:
            self._workers[name] = _Worker(name, self.start(name))

    @property
    def actors(self) -> Mapping[str, Any]:
        """Name → handle, as they are now."""
        return {worker.name: worker.actor for worker in self._workers.values()}

    async def drive(self, episode: Episode) -> None:
        """An `EpisodeFunction`: the episode goes to the worker that has the fewest."""
        import ray

        while True:
            worker = await self._take()
            spare = self._take_spares()
            assignment = Assignment(
                trajectory=episode.trajectory,
                siblings=[one.trajectory for one in all_episodes(episode)[1:]],
                params=episode.services.params,
                spare_indices=spare,
            )
            try:
                driven = await self._ask(worker, assignment, episode)
            except ray.exceptions.RayActorError:
                await self._fenced(worker)
                await asyncio.to_thread(self._read_back, episode)
                continue
            except asyncio.CancelledError:
                raise
            finally:
                worker.samples -= 1
            self._pool += spare[driven.used_indices :]
            self._adopt(episode, driven.trajectory, driven.siblings, driven.issued)
            episode.reward = driven.reward
            if driven.error is not None:
                raise driven.error
            return

    async def _take(self) -> _Worker:
        async with self._there:
            while True:
                living = [worker for worker in self._workers.values() if worker.gone is None]
                if living:
                    worker = min(living, key=lambda one: one.samples)
                    worker.samples += 1
                    return worker
                await self._there.wait()

    def _take_spares(self) -> list[int]:
        if self.buffer is None:
            raise RuntimeError("workers drive samples of a coordinator, whose buffer they need")
        while len(self._pool) < self.spares:
            self._pool.append(self.buffer.take_index())
        spare, self._pool = self._pool[: self.spares], self._pool[self.spares :]
        return spare

    async def _ask(self, worker: _Worker, assignment: Assignment, episode: Episode) -> Driven:
        """Have a worker drive a sample; it hears where the episode is told to stop."""
        import ray

        index = assignment.trajectory.index
        answer = worker.actor.drive.remote(assignment)
        driven: asyncio.Future[Driven] = asyncio.ensure_future(_awaited(answer))
        told: asyncio.Future[None] = asyncio.ensure_future(episode.wait_aborted())
        either: list[asyncio.Future[Any]] = [driven, told]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not driven.done():
                with contextlib.suppress(ray.exceptions.RayError):
                    await worker.actor.abort.remote(index)
            return await asyncio.shield(driven)
        except asyncio.CancelledError:
            # What it has belongs to the sample: wait for that, or end the worker.
            await asyncio.shield(self._stop(worker, index, driven, episode))
            raise
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            told.cancel()

    async def _stop(
        self, worker: _Worker, index: int, driven: asyncio.Future[Driven], episode: Episode
    ) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            await worker.actor.abort.remote(index)
        done, _ = await asyncio.wait([driven], timeout=_CANCEL_S)
        if not done:
            ray.kill(worker.actor)
            await asyncio.wait([driven])
        if driven.exception() is None:
            found = driven.result()
            self._adopt(episode, found.trajectory, found.siblings, found.issued)
            return
        if isinstance(driven.exception(), ray.exceptions.RayActorError):
            await self._fenced(worker)
            await asyncio.to_thread(self._read_back, episode)

    async def _fenced(self, worker: _Worker) -> None:
        """Return once a worker that is gone can write no more."""
        if worker.gone is None:
            worker.gone = asyncio.create_task(self._replace(worker))
        await asyncio.shield(worker.gone)

    async def _replace(self, worker: _Worker) -> None:
        await asyncio.to_thread(self._fence, worker.name)
        self._workers[worker.name] = _Worker(worker.name, self.start(worker.name))
        self.replaced += 1
        async with self._there:
            self._there.notify_all()

    def _fence(self, name: str) -> None:
        self.ledger.writer(
            self.run_id, self.branch, producer=producer_of(self.branch, name)
        ).close()

    def _read_back(self, episode: Episode) -> None:
        """Take what is recorded of a sample and of its siblings, also of those it did not know."""
        reader = self.ledger.reader(self.run_id, self.branch)
        at = episode.trajectory
        prompts = reader.table(
            "prompt_issued", where={"group_index": (at.group_index, at.group_index)}
        )
        mine = pc.and_(
            pc.equal(prompts["group_index"], at.group_index),
            pc.is_valid(prompts["parent_index"]),
        )
        known = {one.trajectory.index for one in all_episodes(episode)}
        issued = [
            event
            for event in events_of(prompts.filter(mine), PromptIssued)
            if event.rollout_ids.tolist() == [at.rollout_id]
        ]
        bare = [replace(at, pieces=[], routing_rows=0)]
        bare += [trajectory_of(event, 0) for event in issued]
        read_trajectories(reader, bare)
        new = [event for event in issued if event.indices.tolist()[0] not in known]
        self._adopt(episode, bare[0], bare[1:], new)

    def _adopt(
        self,
        episode: Episode,
        trajectory: Trajectory,
        siblings: Sequence[Trajectory],
        issued: Sequence[PromptIssued],
    ) -> None:
        """What somebody else has made of an episode becomes what this process has of it."""
        at = episode.trajectory
        at.pieces, at.routing_rows = list(trajectory.pieces), trajectory.routing_rows
        if self.buffer is not None:
            self.buffer.apply(list(issued))
            for one in siblings:
                self.buffer.adopt(one)
        episode.siblings = with_siblings(at, siblings, episode.services).siblings

    # --- rewards

    def __call__(self, sample: ScoredSample) -> Reward:
        """A `RewardFunction`, in this process: for evaluations."""
        return self.reward(sample)

    async def ask(
        self, samples: Sequence[ScoredSample], executor: Executor
    ) -> list[Reward | RewardFailed]:
        """The rewards of a group, by the worker that has the fewest samples."""
        import ray

        for _ in range(3):
            worker = await self._take()
            try:
                return list(await worker.actor.judge.remote(list(samples)))
            except ray.exceptions.RayActorError:
                await self._fenced(worker)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            finally:
                worker.samples -= 1
        raise EnvironmentFailed(
            explain(
                "scoring a group in a worker",
                on=f"group {samples[0].group_index}",
                expected="a worker that lives",
                found="three that died while they scored it",
                do="does the reward function end its process?",
            )
        )


async def _awaited(answer: Any) -> Any:
    return await answer
