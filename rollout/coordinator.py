"""The rollouts of one branch through an asynchronous engine: issued, driven, scored, decided.

What was given out and is not decided lies in the data buffer (`rollout.buffer`), which follows from
the ledger alone. The coordinator keeps nothing besides that a killed process could lose: each stage
is durable before the next one begins, and a new coordinator goes on with what it finds. All of it
runs in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ledger.errors import Conflict, explain
from ledger.events import UNKNOWN_VERSION
from ledger.numbering import VERSION_SPAN, local_number
from rollout.buffer_reading import read_buffer
from rollout.deciding import too_few
from rollout.episode import EpisodeFunction, EpisodeServices, single_turn
from rollout.gate import BufferedSink, GatedEngine, ReportsLoads
from rollout.group_pool import GroupPool
from rollout.group_run import RunServices
from rollout.issuing import PromptIssuer
from rollout.protocol import AsyncEngine
from rollout.rewards import RewardFunction
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.sink import EventSink
from rollout.summary import read_summary
from rollout.tasks import PromptSource, stop_token_ids
from rollout.worker import RolloutProgress, RolloutSummary

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.weights import TensorRecord
    from ledger.writer import Writer

__all__ = ["Coordinator"]

_SCORERS = 16
"""Reward functions that run at a time."""


class Coordinator:
    """Makes the rollout steps of one branch, in one of the shapes of `RolloutShape`.

    Made, and used, in one event loop. Its methods are called one at a time; with `fully_async`
    generation goes on between the calls.
    """

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        writer: Writer,
        engine: AsyncEngine,
        source: PromptSource,
        reward: RewardFunction,
        tokenizer: Any,
        settings: RolloutSettings,
        shape: RolloutShape,
        *,
        drive: EpisodeFunction = single_turn,
        progress: Callable[[RolloutProgress], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Reads what the branch's buffer holds; `writer` must have begun its epoch before.

        `executor` runs the reward functions and the appends; None: threads of its own.

        Raises InvalidArgument for a filter or stop text that cannot work, and what reading raises.
        """
        self._ledger, self._run_id, self._branch = ledger, run_id, branch
        self._settings, self._shape, self._progress = settings, shape, progress
        stop = settings.rollout_stop_token_ids
        params = settings.sampling(stop_token_ids(source, tokenizer) if stop is None else stop)
        self.params = params
        self.buffer = read_buffer(ledger, run_id, branch, source.name)
        self.engine = GatedEngine(engine)
        self._events = EventSink(writer.append, executor)
        self.sink = BufferedSink(self._events, self.buffer)
        if isinstance(engine, ReportsLoads):
            engine.on_loaded = self._events.append
        self._scorers = executor or ThreadPoolExecutor(_SCORERS, thread_name_prefix="reward")
        self._drive = drive
        services = RunServices.of(
            EpisodeServices(
                engine=self.engine,
                sink=self.sink,
                tokenizer=tokenizer,
                params=params,
                run_id=run_id,
                branch=branch,
                run_seed=settings.run_seed,
                source=source.name,
                take_index=self.buffer.take_index,
                adopt=self.buffer.adopt,
            ),
            self.engine,
            drive,
            reward,
            self._scorers,
            settings,
            shape,
        )
        self._groups = GroupPool(
            self.buffer,
            self.sink,
            PromptIssuer(self.buffer, source, tokenizer, settings),
            services,
            settings,
            shape,
            self._notify,
        )
        self._changed, self._roomier = asyncio.Event(), asyncio.Event()
        """Something happened that a batch, or the pump, may have waited for."""
        self._pump: asyncio.Task[None] | None = None
        self._consumer: int | None = None
        """The version that consumes the rollout step; None: it is not known."""
        self._closed = False

    async def rollout(self, rollout_step: int, consumer_version: int | None) -> RolloutSummary:
        """Make, or finish, a rollout step; returns at once where the ledger holds its decisions.

        `consumer_version` is the version before the first optimizer step that trains on it; None:
        it is not there yet, and no staleness can be told.

        Raises:
            InvalidArgument: too few groups passed the filter, or the engine refuses the requests.
            EngineFailed: one group after the other failed.
            Exception: what a reward function, or the ledger, raised. All that was made until then
                is in the ledger.
        """
        batch = self._settings.rollout_batch_size
        groups = self._groups
        groups.begin_step(rollout_step)
        self._consumer = consumer_version
        if len(self.buffer.kept(rollout_step)) < batch:
            await groups.judge_scored()
            if self._shape.fully_async and self._pump is None:
                self._pump = asyncio.create_task(groups.guarded(self._keep_issuing()))
            self._notify()
            await groups.end_step(await self._gather(), consumer_version)
            self._tell("decided")
        groups.rollout_step = rollout_step + 1
        if consumer_version is not None:
            self._consumer = consumer_version + self._shape.versions_per_rollout
        self._notify()
        return read_summary(self._ledger.reader(self._run_id, self._branch), rollout_step)

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """As `AsyncEngine.update_weights`; samples wait at the gate until `release`."""
        return await self.engine.update_weights(version, named)

    async def release(self, version: int) -> None:
        """As `AsyncEngine.release`; samples go on, under the new version.

        How the engines took it is recorded before they get traffic under it.
        """
        await self._events.append(self.engine.loaded())
        await self.engine.release(version)
        self._notify()

    async def close(self) -> None:
        """Stop everything; what was sampled is recorded, and a new coordinator goes on with it.

        The engine stays as it is.
        """
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        await self._groups.close()
        closing = getattr(self._drive, "close", None)
        if closing is not None:
            await closing()
        await self.sink.settle()
        await self._events.close()
        self._scorers.shutdown(wait=False, cancel_futures=True)

    async def _gather(self) -> list[int]:
        """Wait until enough groups pass; those of the batch, the oldest first."""
        batch, passing = self._settings.rollout_batch_size, self._groups.passing
        while True:
            self._raise_failure()
            await self._groups.drop_stale(self._consumer)
            if len(passing) >= batch:
                return sorted(passing)[:batch]
            if self.buffer.dropped(self._groups.rollout_step) >= self._most_dropped():
                raise too_few(self.buffer, self._settings, self._branch, self._groups.rollout_step)
            if not self._shape.fully_async:
                await self._ask_while_short()
            self._changed.clear()
            await self._changed.wait()
            self._tell("generated")

    def _most_dropped(self) -> int:
        asked = self._settings.over_sampling_batch_size or self._settings.rollout_batch_size
        return self._settings.max_rounds * max(asked, self._settings.rollout_batch_size)

    async def _ask_while_short(self) -> None:
        """Ask for groups, those that wait in the buffer first, while the batch cannot be full."""
        settings = self._settings
        asked = settings.over_sampling_batch_size or settings.rollout_batch_size
        groups = self._groups
        while len(groups.runs) + len(groups.passing) < settings.rollout_batch_size:
            waiting = groups.waiting()[:asked]
            for group in waiting:
                groups.start(group)
            await groups.issue(asked - len(waiting))
            groups.round_number += 1
            self._tell("issued")

    def _notify(self) -> None:
        self._changed.set()
        self._roomier.set()

    async def _keep_issuing(self) -> None:
        """Give out prompts whenever there is room for them; for ever."""
        while True:
            for group in self._groups.waiting():
                self._groups.start(group)
            room = self._room()
            if room > 0:
                await self._groups.issue(room)
                self._tell("issued")
                continue
            self._roomier.clear()
            await self._roomier.wait()

    def _room(self) -> int:
        """Groups that may be issued now."""
        if not self.engine.is_open:
            return 0
        runs = self._groups.runs
        consumer, has = self._consumer, self.engine.weight_version
        if consumer is None or has == UNKNOWN_VERSION:
            consumer = has = 0  # how far they are apart is not known
        return self._shape.room(
            self._settings,
            consumer_version=local_number(consumer, VERSION_SPAN),
            engine_version=local_number(has, VERSION_SPAN),
            waiting_groups=len(runs) + len(self._groups.passing),
            running_samples=sum(len(run.group.samples) for run in runs.values()),
        )

    def _raise_failure(self) -> None:
        if self._groups.failure is not None:
            raise self._groups.failure
        if self._closed:
            raise Conflict(explain("making a rollout step", found="a coordinator that is closed"))

    def _tell(self, stage: str) -> None:
        if self._progress is None:
            return
        step = self._groups.rollout_step
        samples = [
            sample.trajectory
            for group in self.buffer.groups.values()
            for sample in group.samples.values()
        ]
        self._progress(
            RolloutProgress(
                rollout_step=step,
                round=self._groups.round_number,
                stage=stage,
                kept_groups=max(len(self._groups.passing), len(self.buffer.kept(step))),
                wanted_groups=self._settings.rollout_batch_size,
                samples=sum(bool(one.pieces) for one in samples),
                tokens=sum(one.response_length for one in samples),
            )
        )
