"""An asynchronous engine for callers that wait: the `Engine` protocol over an `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ledger.errors import Conflict, explain
from rollout.protocol import AsyncEngine, GenerationRequest, GenerationResult, SamplingParams

if TYPE_CHECKING:
    from ledger.weights import TensorRecord
    from rollout.event_loop import EventLoopThread

__all__ = ["SynchronousEngine"]


class SynchronousEngine:
    """Answers a list of requests by asking for all of them at once, in the engine's event loop."""

    def __init__(
        self,
        asynchronous: AsyncEngine,
        loop: EventLoopThread,
        *,
        check: Callable[[GenerationRequest, SamplingParams], None] | None = None,
    ) -> None:
        """`loop` runs `asynchronous`, which has started, and ends with it.

        `check` raises InvalidArgument for a request that the model cannot take, before any is sent.
        """
        self.name, self.version = asynchronous.name, asynchronous.version
        self.asynchronous, self.loop = asynchronous, loop
        self._check = check
        self._paused: str | None = None

    @property
    def weight_version(self) -> int:
        """The version that is loaded."""
        return self.asynchronous.weight_version

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationResult]:
        """Continue every request; see `rollout.protocol.Engine`.

        Bits depend on what an engine computes together, which it decides itself. Raises also
        EngineFailed, once every request has ended.
        """
        if self._paused is not None:
            raise Conflict(
                explain(
                    "generating",
                    on=f"engine {self.name}",
                    expected="an engine that serves",
                    found=self._paused,
                    do="call release(version) after a finished update",
                )
            )
        if self._check is not None:
            for request in requests:
                self._check(request, params)
        return self.loop.call(self._all(requests, params))

    async def _all(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationResult]:
        answers = await asyncio.gather(
            *(self.asynchronous.generate(request, params) for request in requests),
            return_exceptions=True,
        )
        results: list[GenerationResult] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            results.append(answer)
        return results

    def update_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """Load new weights and stay paused; see `rollout.protocol.Engine`."""
        records = self.loop.call(self.asynchronous.update_weights(version, named))
        self._paused = f"paused: version {version} is loaded and waits for release"
        return records

    def release(self, version: int) -> None:
        """Serve again; see `rollout.protocol.Engine`."""
        self.loop.call(self.asynchronous.release(version))
        self._paused = None

    def close(self) -> None:
        """Free everything, the event loop too."""
        if self._paused == "closed":
            return
        self._paused = "closed"
        try:
            self.loop.call(self.asynchronous.close())
        finally:
            self.loop.close()
