"""Between episodes and the world: a gate before the engine, the buffer behind the sink."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ledger.events import SampleDecided, WeightsLoaded
from ledger.fields import Event
from rollout.buffer import FINAL, DataBuffer
from rollout.protocol import (
    AsyncEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    nothing_sampled,
)
from rollout.sink import Appender

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["BufferedSink", "GatedEngine", "ReportsLoads", "Sleeps"]


@runtime_checkable
class ReportsLoads(Protocol):
    """An engine that says of each of its servers how it took a version."""

    on_loaded: Callable[[Sequence[WeightsLoaded]], Awaitable[None]] | None
    """Stores what a server that was started again says, before it gets traffic."""

    def loaded(self) -> list[WeightsLoaded]:
        """The events of the update that waits for its release: to be stored before it."""


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can give its GPU memory back."""

    async def sleep(self) -> None:
        """Do so until the next update of the weights."""


class GatedEngine:
    """An engine whose requests wait while it takes new weights, instead of being sent."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Open."""
        self.name, self.version = engine.name, engine.version
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._waiting: dict[asyncio.Task[Any], str | None] = {}
        """What waits for the gate, by the name of its request; names may be missing."""

    @property
    def weight_version(self) -> int:
        """As `AsyncEngine.weight_version`."""
        return self._engine.weight_version

    def loaded(self) -> list[WeightsLoaded]:
        """As `ReportsLoads.loaded`; empty where the engine does not say."""
        return self._engine.loaded() if isinstance(self._engine, ReportsLoads) else []

    @property
    def is_open(self) -> bool:
        """Whether requests are sent."""
        return self._open.is_set()

    async def opened(self) -> None:
        """Return when requests are sent."""
        await self._open.wait()

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """As `AsyncEngine.generate`, once the gate is open."""
        if not self._open.is_set():
            waiting = asyncio.ensure_future(self._open.wait())
            self._waiting[waiting] = request.request_id
            try:
                await asyncio.wait([waiting])
            finally:
                del self._waiting[waiting]
                was_aborted = not waiting.done() or waiting.cancelled()
                waiting.cancel()
            if was_aborted:
                return nothing_sampled(request, params)
        return await self._engine.generate(request, params)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As `AsyncEngine.abort`; requests that wait at the gate end, too."""
        for waiting, name in self._waiting.items():
            if request_ids is None or name in request_ids:
                waiting.cancel()
        await self._engine.abort(request_ids)

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """As `AsyncEngine.update_weights`; where it fails the old weights go on being served."""
        self._open.clear()
        try:
            return await self._engine.update_weights(version, named)
        except BaseException:
            self._open.set()
            raise

    async def sleep(self) -> None:
        """As `Sleeps.sleep`; requests wait until `release`. Nothing where the engine does not."""
        if isinstance(self._engine, Sleeps):
            self._open.clear()
            await self._engine.sleep()

    async def release(self, version: int) -> None:
        """As `AsyncEngine.release`."""
        await self._engine.release(version)
        self._open.set()

    async def close(self) -> None:
        """As `AsyncEngine.close`."""
        await self._engine.close()


class BufferedSink:
    """An `Appender` that refuses late pieces, and shows the buffer what became durable."""

    def __init__(self, sink: Appender, buffer: DataBuffer) -> None:
        """Events of one branch, whose buffer it is."""
        self._sink, self._buffer = sink, buffer
        self._storing: set[asyncio.Task[None]] = set()
        self._deciding: set[int] = set()
        """Samples whose final decision is being stored."""

    async def append(self, events: Sequence[Event]) -> None:
        """As `Appender.append`. Raises Conflict, too, for a piece that comes too late or twice."""
        self._buffer.refuse_late(events, deciding=self._deciding)
        final = {
            event.index
            for event in events
            if isinstance(event, SampleDecided) and event.decision in FINAL
        }
        self._deciding |= final
        stored = asyncio.create_task(self._store(events, final))
        self._storing.add(stored)
        stored.add_done_callback(self._storing.discard)
        # The buffer hears of it even where the caller is cancelled meanwhile.
        await asyncio.shield(stored)

    async def settle(self) -> None:
        """Return when everything that was handed over is stored, or was refused."""
        await asyncio.gather(*self._storing, return_exceptions=True)

    async def _store(self, events: Sequence[Event], final: Set[int]) -> None:
        try:
            await self._sink.append(events)
            self._buffer.apply(events)
        finally:
            self._deciding -= final
