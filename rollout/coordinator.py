"""The rollouts of one branch through an asynchronous engine: issued, driven, scored, decided.

What was given out and is not decided lies in the data buffer (`rollout.buffer`), which follows from
the ledger alone. The coordinator keeps nothing besides that a killed process could lose: each stage
is durable before the next one begins, and a new coordinator goes on with what it finds. All of it
runs in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ledger.errors import Conflict, explain
from ledger.events import UNKNOWN_VERSION
from ledger.fields import Event
from ledger.numbering import VERSION_SPAN, local_number
from rollout.buffer import BufferedGroup
from rollout.buffer_reading import read_buffer
from rollout.deciding import group_decisions, too_few, why_stale
from rollout.episode import EpisodeFunction, EpisodeServices, single_turn
from rollout.filters import create_filter
from rollout.gate import BufferedSink, GatedEngine, ReportsLoads
from rollout.group_run import GroupRun, RunServices, all_failed, scored_sample
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
        self._filter = create_filter(settings.dynamic_sampling_filter_path)
        self._tokenizer = tokenizer
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
        self._services = RunServices.of(
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
        self._issuer = PromptIssuer(self.buffer, source, tokenizer, settings)
        self._runs: dict[int, GroupRun] = {}
        """Groups on their way."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._passing: dict[int, GroupRun] = {}
        """Groups that are scored and passed the filter: they wait for a batch."""
        self._deciding: set[int] = set()
        """Groups whose decision is being stored."""
        self._changed, self._roomier = asyncio.Event(), asyncio.Event()
        """Something happened that a batch, or the pump, may have waited for."""
        self._failure: BaseException | None = None
        self._pump: asyncio.Task[None] | None = None
        self._step = 0
        """The rollout step that is made, or comes next."""
        self._consumer: int | None = None
        """The version that consumes it; None before the first one."""
        self._rounds = 0
        self._failures_in_a_row = 0
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
        self._step, self._consumer, self._rounds = rollout_step, consumer_version, 0
        if len(self.buffer.kept(rollout_step)) < batch:
            await self._judge_scored()
            if self._shape.fully_async and self._pump is None:
                self._pump = asyncio.create_task(self._guarded(self._keep_issuing()))
            self._notify()
            chosen = await self._gather()
            await self._end_step(chosen)
            self._tell("decided")
        self._step = rollout_step + 1
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
        await self._stop(list(self._runs.values()))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        closing = getattr(self._services.drive, "close", None)
        if closing is not None:
            await closing()
        await self.sink.settle()
        await self._events.close()
        self._scorers.shutdown(wait=False, cancel_futures=True)

    # --- gathering a batch

    async def _gather(self) -> list[GroupRun]:
        """Wait until enough groups pass; the batch, by group."""
        batch = self._settings.rollout_batch_size
        while True:
            self._raise_failure()
            await self._drop_stale()
            if len(self._passing) >= batch:
                return [self._passing[key] for key in sorted(self._passing)[:batch]]
            if self.buffer.dropped(self._step) >= self._most_dropped():
                raise too_few(self.buffer, self._settings, self._branch, self._step)
            if not self._shape.fully_async:
                await self._ask_while_short()
            self._changed.clear()
            await self._changed.wait()

    async def _judge_scored(self) -> None:
        """Groups that another process scored, and did not decide."""
        for group in self._waiting():
            if group.is_scored:
                await self._judge(GroupRun(group, self._services))

    def _most_dropped(self) -> int:
        asked = self._settings.over_sampling_batch_size or self._settings.rollout_batch_size
        return self._settings.max_rounds * max(asked, self._settings.rollout_batch_size)

    async def _ask_while_short(self) -> None:
        """Ask for groups, those that wait in the buffer first, while the batch cannot be full."""
        settings = self._settings
        asked = settings.over_sampling_batch_size or settings.rollout_batch_size
        while len(self._runs) + len(self._passing) < settings.rollout_batch_size:
            waiting = self._waiting()[:asked]
            for group in waiting:
                self._start(group)
            await self._issue(asked - len(waiting))
            self._rounds += 1

    def _waiting(self) -> list[BufferedGroup]:
        """Open groups that nobody drives, oldest first."""
        taken = self._runs.keys() | self._passing.keys() | self._deciding
        return [group for key, group in sorted(self.buffer.groups.items()) if key not in taken]

    async def _issue(self, count: int) -> None:
        """Give out new prompts and start their groups."""
        if count <= 0:
            return
        events = self._issuer.take(count, rollout_step=self._step, round_number=self._rounds)
        await self.sink.append(events)
        for event in events:
            self._start(self.buffer.groups[event.group_index])
        self._tell("issued")

    def _start(self, group: BufferedGroup) -> None:
        run = GroupRun(group, self._services)
        self._runs[group.group_index] = run
        self._tasks[group.group_index] = asyncio.create_task(self._guarded(self._drive(run)))

    async def _drive(self, run: GroupRun) -> None:
        """Drive a group to its end, and decide what can be decided at once."""
        try:
            await run.run()
            if run.outcome == "scored":
                self._failures_in_a_row = 0
                await self._judge(run)
            elif run.outcome == "failed" and not self._closed:
                await self._give_up(run)
        finally:
            del self._runs[run.group.group_index], self._tasks[run.group.group_index]
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._roomier.set()

    async def _judge(self, run: GroupRun) -> None:
        """Let the filter look at a scored group."""
        found = self._filter(
            self._settings,
            [
                scored_sample(s.trajectory, s.reward, self._tokenizer, self.params)
                for index, s in run.group.samples.items()
                if index != run.baseline and s.trajectory.parent_index is None
            ],
        )
        if found.keep:
            self._passing[run.group.group_index] = run
            self._tell("generated")
            return
        await self._decide(
            run, "filtered", found.reason or "", self._settings.dynamic_sampling_filter_path
        )

    async def _give_up(self, run: GroupRun) -> None:
        """A sample of the group failed: the whole group is decided so, and its prompt comes again.

        What failed is in no statistics: no sample of the group has a score.
        """
        group, most = run.group, self._shape.max_sample_retries
        self._failures_in_a_row += 1
        index, reason = next(iter(run.failed.items()))
        others = f"sample {index} of its group failed: {reason}"
        events = group_decisions(
            group, self._step, "failed", others, "max_sample_retries", reasons=run.failed
        )
        await self._append(events, again=group if group.failures < most else None)
        limit = max(8, 2 * self._settings.rollout_batch_size)
        if self._failures_in_a_row >= limit:
            raise all_failed(self._failures_in_a_row, reason)

    async def _drop_stale(self) -> None:
        """Decide groups that would be older than allowed when they are consumed now."""
        bound, consumer = self._shape.max_weight_staleness, self._consumer
        if bound is None or consumer is None:
            return
        again = self._shape.async_unused_samples_handler == "retry"
        for run in list(self._passing.values()):
            found = run.group.staleness(consumer)
            if found is None or found > bound:
                why = why_stale(found, bound)
                await self._decide(run, "stale", why, "max_weight_staleness", again=again)

    async def _decide(
        self,
        run: GroupRun,
        decision: str,
        reason: str,
        rule: str,
        *,
        again: bool = False,
    ) -> None:
        """Decide a whole group; `again`: in the same commit its prompt is issued once more."""
        consumer = self._consumer if decision == "stale" else None
        events = group_decisions(
            run.group,
            self._step,
            decision,
            reason,
            rule,
            baseline=run.baseline,
            consumer=consumer,
        )
        self._deciding.add(run.group.group_index)
        self._passing.pop(run.group.group_index, None)
        await self._append(events, again=run.group if again else None)
        self._deciding.discard(run.group.group_index)

    async def _append(self, events: Sequence[Event], *, again: BufferedGroup | None) -> None:
        """Store decisions; the prompt of `again` is issued once more in the same commit."""
        if again is None:
            await self.sink.append(events)
            return
        retry = self._issuer.again(again, rollout_step=self._step, round_number=self._rounds)
        await self.sink.append([*events, retry])
        self._start(self.buffer.groups[retry.group_index])

    # --- the end of a step

    async def _end_step(self, chosen: Sequence[GroupRun]) -> None:
        """Decide the batch, and what becomes of the groups that are not in it, in one commit."""
        events: list[Event] = []
        keys = {run.group.group_index for run in chosen}
        self._deciding |= keys
        for run in chosen:
            del self._passing[run.group.group_index]
            events += group_decisions(
                run.group,
                self._step,
                "kept",
                "",
                self._settings.dynamic_sampling_filter_path,
                baseline=run.baseline,
                consumer=self._consumer,
            )
        if not self._shape.fully_async:
            events += await self._cut_the_rest(keys)
        await self.sink.append(events)
        self._deciding -= keys

    async def _cut_the_rest(self, chosen: Collection[int]) -> list[Event]:
        """End what still runs; its groups are dropped, or with partial rollouts put back."""
        partial = self._shape.partial_rollout
        running = list(self._runs.values())
        stopped = self._runs | self._passing
        if partial:
            # Where only the reward is missing, nothing is generated: it may come meanwhile.
            running = [run for run in running if not run.is_scoring]
        tasks = [self._tasks[run.group.group_index] for run in running]
        await self._stop(running)
        for run, task in zip(running, tasks, strict=True):
            if run.is_scoring:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._raise_failure()
        stopped |= self._passing
        reason = f"{self._settings.rollout_batch_size} groups were kept before it"
        events: list[Event] = []
        for key, group in list(self.buffer.groups.items()):
            if key in chosen:
                continue
            run = stopped.get(key) or GroupRun(group, self._services)
            if partial:
                how = "whole" if run.is_whole else "cut"
                said = ("recycled", f"{how}: {reason}", "partial_rollout")
            else:
                said = ("surplus" if run.is_whole else "aborted", reason, "rollout_batch_size")
                self._passing.pop(key, None)
            events += group_decisions(group, self._step, *said, baseline=run.baseline)
        return events

    async def _stop(self, runs: Sequence[GroupRun]) -> None:
        await asyncio.gather(*(run.stop(self._shape.abort_grace_s) for run in runs))

    # --- fully asynchronous

    async def _keep_issuing(self) -> None:
        """Give out prompts whenever there is room for them; for ever."""
        while True:
            for group in self._waiting():
                self._start(group)
            room = self._room()
            if room > 0:
                await self._issue(room)
                continue
            self._roomier.clear()
            await self._roomier.wait()

    def _room(self) -> int:
        """Groups that may be issued now."""
        if not self.engine.is_open:
            return 0
        consumer, has = self._consumer, self.engine.weight_version
        if consumer is None or has == UNKNOWN_VERSION:
            consumer = has = 0  # how far they are apart is not known
        return self._shape.room(
            self._settings,
            consumer_version=local_number(consumer, VERSION_SPAN),
            engine_version=local_number(has, VERSION_SPAN),
            waiting_groups=len(self._runs) + len(self._passing),
            running_samples=sum(len(run.group.samples) for run in self._runs.values()),
        )

    # --- what all need

    async def _guarded(self, work: Any) -> None:
        """Run a task of the coordinator; what it raises is raised by `rollout`."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
            self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Conflict(explain("making a rollout step", found="a coordinator that is closed"))

    def _tell(self, stage: str) -> None:
        if self._progress is None:
            return
        samples = [
            sample.trajectory
            for group in self.buffer.groups.values()
            for sample in group.samples.values()
        ]
        self._progress(
            RolloutProgress(
                rollout_step=self._step,
                round=self._rounds,
                stage=stage,
                kept_groups=max(len(self._passing), len(self.buffer.kept(self._step))),
                wanted_groups=self._settings.rollout_batch_size,
                samples=sum(bool(one.pieces) for one in samples),
                tokens=sum(one.response_length for one in samples),
            )
        )
