"""The groups of a branch that run or wait for a batch, and what is decided of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ledger.events import PromptIssued
from ledger.fields import Event
from rollout.buffer import BufferedGroup, DataBuffer
from rollout.deciding import group_decisions, why_stale
from rollout.filters import create_filter
from rollout.gate import BufferedSink
from rollout.group_run import GroupRun, RunServices, all_failed, scored_sample
from rollout.issuing import PromptIssuer
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape

__all__ = ["GroupPool"]


class GroupPool:
    """Drives groups, lets the filter judge them, and decides those that come to no batch.

    A group is in one of four places: nobody drives it (`waiting`), it runs (`runs`), it has passed
    the filter (`passing`), or its decision is being stored.
    """

    def __init__(
        self,
        buffer: DataBuffer,
        sink: BufferedSink,
        issuer: PromptIssuer,
        services: RunServices,
        settings: RolloutSettings,
        shape: RolloutShape,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called whenever a group has come to another place, or something failed.

        Raises InvalidArgument for a filter that cannot work.
        """
        self.runs: dict[int, GroupRun] = {}
        """On their way, by group."""
        self.passing: dict[int, GroupRun] = {}
        """Scored, and let through by the filter: they wait for a batch."""
        self.failure: BaseException | None = None
        """What stopped a group in a way that stops everything."""
        self.rollout_step = 0
        """The one that is made, or comes next: it decides, and issues."""
        self.round_number = 0
        """Asks for prompts in this rollout step so far."""
        self._buffer, self._sink, self._issuer, self._services = buffer, sink, issuer, services
        self._settings, self._shape, self._changed = settings, shape, changed
        self._filter = create_filter(settings.dynamic_sampling_filter_path)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._deciding: set[int] = set()
        self._failures_in_a_row = 0
        self._is_ending = False
        """The rollout step has its batch: what is issued from now on waits for the next one."""
        self._closed = False

    def waiting(self) -> list[BufferedGroup]:
        """Open groups that nobody drives, oldest first."""
        taken = self.runs.keys() | self.passing.keys() | self._deciding
        return [group for key, group in sorted(self._buffer.groups.items()) if key not in taken]

    async def issue(self, count: int) -> None:
        """Give out `count` new prompts, and drive their groups."""
        if count <= 0:
            return
        prompts = self._issuer.take(
            count, rollout_step=self.rollout_step, round_number=self.round_number
        )
        await self._sink.append(prompts)
        self._start_issued(prompts)

    def _start_issued(self, prompts: Sequence[PromptIssued]) -> None:
        for prompt in prompts:
            group = self._buffer.groups.get(prompt.group_index)
            if group is not None:
                self.start(group)

    def start(self, group: BufferedGroup) -> None:
        """Drive a group, unless somebody does already."""
        key = group.group_index
        if key in self.runs or key in self.passing or key in self._deciding:
            return
        run = GroupRun(group, self._services)
        self.runs[key] = run
        self._tasks[key] = asyncio.create_task(self.guarded(self._drive(run)))

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; what it raises is in `failure`, from where it stops everything."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = self.failure or error
            self._changed()

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
            del self.runs[run.group.group_index], self._tasks[run.group.group_index]
            self._changed()

    def begin_step(self, rollout_step: int) -> None:
        """From now on groups are issued, driven and decided for this rollout step."""
        self.rollout_step, self.round_number = rollout_step, 0
        self._is_ending = False

    async def judge_scored(self) -> None:
        """Let the filter judge groups that another process scored, and did not decide."""
        for group in self.waiting():
            if group.is_scored:
                await self._judge(GroupRun(group, self._services))

    async def _judge(self, run: GroupRun) -> None:
        found = self._filter(
            self._settings,
            [
                scored_sample(
                    s.trajectory,
                    s.reward,
                    self._services.episodes.tokenizer,
                    self._services.episodes.params,
                )
                for index, s in run.group.samples.items()
                if index != run.baseline and s.trajectory.parent_index is None
            ],
        )
        if found.keep:
            self.passing[run.group.group_index] = run
            return
        rule = self._settings.dynamic_sampling_filter_path
        events = group_decisions(
            run.group,
            self.rollout_step,
            "filtered",
            found.reason or "",
            rule,
            baseline=run.baseline,
        )
        await self._decide(run, events)

    async def _give_up(self, run: GroupRun) -> None:
        """A sample of the group failed: the whole group is decided so, and its prompt comes again.

        What failed is in no statistics: no sample of the group has a score.
        """
        group = run.group
        self._failures_in_a_row += 1
        index, reason = next(iter(run.failed.items()))
        events = group_decisions(
            group,
            self.rollout_step,
            "failed",
            f"sample {index} of its group failed: {reason}",
            "max_sample_retries",
            reasons=run.failed,
        )
        await self._decide(run, events, again=group.failures < self._shape.max_sample_retries)
        limit = max(8, 2 * self._settings.rollout_batch_size)
        if self._failures_in_a_row >= limit:
            raise all_failed(self._failures_in_a_row, reason)

    async def drop_stale(self, consumer_version: int | None) -> None:
        """Decide groups that would be older than allowed if they were consumed now."""
        bound = self._shape.max_weight_staleness
        if bound is None or consumer_version is None:
            return
        for run in list(self.passing.values()):
            found = run.group.staleness(consumer_version)
            if found is not None and found <= bound:
                continue
            events = group_decisions(
                run.group,
                self.rollout_step,
                "stale",
                why_stale(found, bound),
                "max_weight_staleness",
                baseline=run.baseline,
                consumer=consumer_version,
            )
            retry = self._shape.async_unused_samples_handler == "retry"
            await self._decide(run, events, again=retry)

    async def _decide(self, run: GroupRun, events: Sequence[Event], *, again: bool = False) -> None:
        """Store the decisions on a group; `again`: its prompt is issued in the same commit."""
        prompts: list[PromptIssued] = []
        if again:
            prompts.append(
                self._issuer.again(
                    run.group, rollout_step=self.rollout_step, round_number=self.round_number
                )
            )
        key = run.group.group_index
        self._deciding.add(key)
        self.passing.pop(key, None)
        try:
            await self._sink.append([*events, *prompts])
        finally:
            self._deciding.discard(key)
        if not self._is_ending:
            self._start_issued(prompts)

    async def end_step(self, keys: Sequence[int], consumer_version: int | None) -> None:
        """Keep the groups `keys`, and, unless generation goes on, decide what becomes of the
        others; in one commit."""
        runs = [self.passing.pop(key) for key in keys]
        self._deciding |= set(keys)
        events: list[Event] = []
        for run in runs:
            events += group_decisions(
                run.group,
                self.rollout_step,
                "kept",
                "",
                self._settings.dynamic_sampling_filter_path,
                baseline=run.baseline,
                consumer=consumer_version,
            )
        try:
            if not self._shape.fully_async:
                events += await self._cut_the_rest()
            await self._sink.append(events)
        finally:
            self._deciding -= set(keys)

    async def _cut_the_rest(self) -> list[Event]:
        """End what still runs; its groups are dropped, or with partial rollouts put back."""
        partial = self._shape.partial_rollout
        self._is_ending = True
        stopped = self.runs | self.passing
        # Where only the reward is missing nothing is generated: a group that stays may wait for it.
        running = [run for run in self.runs.values() if not (partial and run.is_scoring)]
        tasks = [self._tasks[run.group.group_index] for run in running]
        await self._stop(running)
        for run, task in zip(running, tasks, strict=True):
            if run.is_scoring:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What a task had handed over when it was cancelled is in the buffer after this.
        await self._sink.settle()
        if self.failure is not None:
            raise self.failure
        stopped |= self.passing
        reason = f"{self._settings.rollout_batch_size} groups were kept before it"
        events: list[Event] = []
        for key, group in list(self._buffer.groups.items()):
            if key in self._deciding:
                continue
            run = stopped.get(key) or GroupRun(group, self._services)
            if partial:
                how = "whole" if run.is_whole else "cut"
                said = ("recycled", f"{how}: {reason}", "partial_rollout")
            else:
                said = ("surplus" if run.is_whole else "aborted", reason, "rollout_batch_size")
                self.passing.pop(key, None)
            events += group_decisions(group, self.rollout_step, *said, baseline=run.baseline)
        return events

    async def _stop(self, runs: Sequence[GroupRun]) -> None:
        await asyncio.gather(*(run.stop(self._shape.abort_grace_s) for run in runs))

    async def close(self) -> None:
        """Stop every group where it stands; nothing is decided."""
        self._closed = True
        await self._stop(list(self.runs.values()))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
