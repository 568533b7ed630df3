"""The coordinator's event loop, as the process that trains sees it: calls that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ledger.events import WeightsLoaded
from rollout.coordinator import Coordinator
from rollout.event_loop import EventLoopThread
from rollout.protocol import AsyncEngine, GenerationRequest, GenerationResult, SamplingParams
from rollout.worker import RolloutSummary

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["AsyncRollouts"]

_T = TypeVar("_T")


class AsyncRollouts:
    """An `Engine`, and the rollouts of a branch, in an event loop of their own.

    Every call waits for its end; what was begun in the loop goes on between the calls.
    """

    def __init__(self, create: Coroutine[Any, Any, AsyncEngine]) -> None:
        """Start the loop, and in it the engine. Raises what `create` raises."""
        self._loop = EventLoopThread("rollouts")
        self._coordinator: Coordinator | None = None
        try:
            self._engine: AsyncEngine = self._loop.call(create)
        except BaseException:
            self._loop.close()
            raise
        self.name, self.version = self._engine.name, self._engine.version

    def attach(self, create: Callable[[AsyncEngine], Coordinator]) -> None:
        """Make the coordinator of a branch, in the loop. Raises what `create` raises."""
        made = self._loop.call(_made(create, self._engine))
        self._coordinator, self._engine = made, made.engine

    def rollout(self, rollout_step: int, consumer_version: int | None) -> RolloutSummary:
        """As `Coordinator.rollout`; after `attach`."""
        if self._coordinator is None:
            raise RuntimeError("rollout() before attach(): there is no branch to write to")
        return self._loop.call(self._coordinator.rollout(rollout_step, consumer_version))

    def run(self, work: Callable[[AsyncEngine], Coroutine[Any, Any, _T]]) -> _T:
        """Do some work with the engine, in the loop. Raises what it raises."""
        return self._loop.call(work(self._engine))

    def loaded(self) -> list[WeightsLoaded]:
        """How its servers took the version that waits for its release; empty without servers."""
        return [] if self._coordinator is None else self._coordinator.engine.loaded()

    @property
    def weight_version(self) -> int:
        """As `Engine.weight_version`."""
        return self._engine.weight_version

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationResult]:
        """As `Engine.generate`, except that nothing promises the same bits again."""
        return self._loop.call(self._generate(requests, params))

    async def _generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationResult]:
        return await asyncio.gather(*(self._engine.generate(one, params) for one in requests))

    def update_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """As `Engine.update_weights`; samples on their way wait, or are cut, until `release`."""
        return self._loop.call(self._engine.update_weights(version, named))

    def sleep(self) -> None:
        """Give the engine's GPU memory back until the next update. Raises what it raises."""
        if self._coordinator is None:
            raise RuntimeError("sleep() before attach(): there is no rollout to rest from")
        self._loop.call(self._coordinator.engine.sleep())

    def release(self, version: int) -> None:
        """As `Engine.release`; samples on their way go on."""
        if self._coordinator is None:
            self._loop.call(self._engine.release(version))
        else:
            self._loop.call(self._coordinator.release(version))

    def close(self) -> None:
        """Stop the rollouts, all they have recorded, and free the engine."""
        try:
            if self._coordinator is not None:
                self._loop.call(self._coordinator.close())
            self._loop.call(self._engine.close())
        finally:
            self._loop.close()


async def _made(create: Callable[[AsyncEngine], Coordinator], engine: AsyncEngine) -> Coordinator:
    return create(engine)
