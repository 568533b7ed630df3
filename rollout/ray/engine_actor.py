"""An engine in an actor of its own. It serves nothing before it was given a published version."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ledger.errors import EngineFailed, LedgerError
from ledger.events import WeightsLoaded
from ledger.weights import TensorRecord
from rollout.gate import ReportsLoads
from rollout.imports import load_function
from rollout.protocol import AsyncEngine, GenerationRequest, GenerationResult, SamplingParams
from rollout.published import Published, read_version

__all__ = ["EngineActor", "Loaded", "NotServing"]


class NotServing(LedgerError):
    """The engine was started anew, and nobody has given it weights yet."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine took a version, and waits for its release."""

    version: int
    records: list[TensorRecord]
    """Of the engine's own parameters."""
    told: Sequence[WeightsLoaded]
    """What a server says of it, where the engine is one."""
    sent_bytes: int
    transport: str
    transfer_time_s: float


class EngineActor:
    """What runs in the actor. Ray starts it anew where it dies."""

    def __init__(
        self, name: str, factory: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """`factory` is the import path of a function that makes an `AsyncEngine` of `arguments`."""
        os.environ.update(environment)
        self._name = name
        self._engine: AsyncEngine = load_function(factory, setting="--layout")(**arguments)
        self._serving: int | None = None
        self._started = False

    async def describe(self) -> tuple[str, str, int]:
        """Name and version of the engine, and the actor's process."""
        if not self._started:
            # Servers start in the event loop, which runs only now.
            self._started = True
            start = getattr(self._engine, "start", None)
            if start is not None:
                await start()
        return self._engine.name, self._engine.version, os.getpid()

    async def serving(self) -> int | None:
        """The version that it serves; None where it waits for one."""
        return self._serving

    async def live(self) -> None:
        """Answer only by the actor's death: whoever waits for it hears of that at once."""
        await asyncio.Event().wait()

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """As `AsyncEngine.generate`. Raises NotServing, too."""
        if self._serving is None:
            raise NotServing(f"engine {self._name} has no weights yet")
        try:
            result = await self._engine.generate(request, params)
        except EngineFailed:
            if isinstance(self._engine, ReportsLoads):
                # Its server is gone. Ray starts this process anew, and the server with it.
                os._exit(1)
            raise
        return replace(result, engine_address=f"ray:{self._name}")

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """As `AsyncEngine.abort`."""
        await self._engine.abort(request_ids)

    async def load(self, version: int, source: Published | Mapping[str, Any]) -> Loaded:
        """Load a version, from its folder or as it is given; it stays paused. Raises as
        `read_version` and `AsyncEngine.update_weights`."""
        await self.describe()
        began = time.perf_counter()
        named = read_version(source)[1] if isinstance(source, Published) else source
        records = await self._engine.update_weights(version, named.items())
        told = self._engine.loaded() if isinstance(self._engine, ReportsLoads) else []
        return Loaded(
            version=version,
            records=records,
            told=told,
            sent_bytes=sum(int(tensor.nbytes) for tensor in named.values()),
            transport="disk" if isinstance(source, Published) else "memory",
            transfer_time_s=time.perf_counter() - began,
        )

    async def release(self, version: int) -> None:
        """As `AsyncEngine.release`."""
        await self._engine.release(version)
        self._serving = version
