"""An engine of this process for many callers at a time: what waits is sampled as one batch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ledger.errors import Conflict, EngineFailed, LedgerError, explain
from rollout.protocol import (
    Engine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    check_request,
    nothing_sampled,
)

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["AbortableEngine", "BatchingEngine"]


class AbortableEngine(Engine, Protocol):
    """An `Engine` that can end single requests of a call between two tokens."""

    vocab_size: int
    max_positions: int

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        *,
        aborted: Callable[[int], bool] | None = None,
    ) -> list[GenerationResult]:
        """As `Engine.generate`; `aborted(i)`, asked between tokens, ends request number i."""


@dataclass(slots=True, eq=False)
class _Waiting:
    name: str
    request: GenerationRequest
    params: SamplingParams
    answer: asyncio.Future[GenerationResult]
    aborted: bool = False
    """Set by the event loop, read by the thread that samples."""


class BatchingEngine:
    """An `AsyncEngine` over one in this process, which a thread of its own uses.

    Requests that wait when a batch ends, with the parameters of the one that waits longest, are the
    next batch. What is sampled is a function of seeds and positions; the bits of log-probabilities
    depend on what a request happened to share its batch with, as on a server.

    New weights wait for the running batch, or (`pause_mode` 'abort') cut it short.
    """

    def __init__(
        self, engine: AbortableEngine, *, max_batch_rows: int = 256, pause_mode: str = "wait"
    ) -> None:
        """`engine` belongs to this object from now on."""
        self.name, self.version = engine.name, engine.version
        self._engine, self._max_rows, self._pause_mode = engine, max_batch_rows, pause_mode
        self._names = itertools.count()
        self._waiting: dict[str, _Waiting] = {}
        self._batch: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._paused = self._closed = False

    @property
    def weight_version(self) -> int:
        """The version that is loaded."""
        return self._engine.weight_version

    def check(self, request: GenerationRequest, params: SamplingParams) -> None:
        """Raises InvalidArgument for a request that the model cannot take."""
        engine = self._engine
        check_request(
            request, params, vocab_size=engine.vocab_size, max_positions=engine.max_positions
        )

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """Continue one sample; see `rollout.protocol.AsyncEngine`.

        Raises also Conflict: the engine is closed, or a request of the same name is on its way.
        """
        self.check(request, params)
        name = request.request_id or f"request-{next(self._names)}"
        running = name in self._waiting or any(one.name == name for one in self._batch)
        if self._closed or running:
            raise Conflict(
                explain(
                    "generating",
                    on=f"engine {self.name}, request {name}",
                    expected="an open engine, and a name that no other request has",
                    found="closed" if self._closed else "the name of a running request",
                )
            )
        one = _Waiting(name, request, params, asyncio.get_running_loop().create_future())
        self._waiting[name] = one
        self._go_on()
        try:
            return await one.answer
        except asyncio.CancelledError:
            one.aborted = True
            self._waiting.pop(name, None)
            raise

    def _go_on(self) -> None:
        if self._runner is None and self._waiting and not self._paused and not self._closed:
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Batches, one after the other, until nothing waits or the engine is paused."""
        try:
            await asyncio.sleep(0)  # whoever asks at the same time comes into the first batch
            while self._waiting and not self._paused and not self._closed:
                await self._run_batch()
        finally:
            self._runner = None
            self._go_on()

    async def _run_batch(self) -> None:
        params = next(iter(self._waiting.values())).params
        together = [one for one in self._waiting.values() if one.params == params]
        batch = self._batch = together[: self._max_rows]
        for one in batch:
            del self._waiting[one.name]
        try:
            results = await self._in_thread(
                lambda: self._engine.generate(
                    [one.request for one in batch], params, aborted=lambda i: batch[i].aborted
                )
            )
        except Exception as error:
            failed = error if isinstance(error, LedgerError) else self._failed(error)
            for one in batch:
                _fail(one, failed)
        else:
            for one, result in zip(batch, results, strict=True):
                if not one.answer.done():
                    one.answer.set_result(replace(result, request_id=one.name))
        finally:
            self._batch = []

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _failed(self, error: Exception) -> EngineFailed:
        return EngineFailed(
            explain(
                "generating",
                on=f"engine {self.name}",
                expected="an answer",
                found=f"{type(error).__name__}: {error}",
            )
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests with what they have; see `rollout.protocol.AsyncEngine`."""
        names = None if request_ids is None else set(request_ids)
        for one in self._batch:
            if names is None or one.name in names:
                one.aborted = True
        for name in list(self._waiting):
            if names is None or name in names:
                one = self._waiting.pop(name)
                if not one.answer.done():
                    one.answer.set_result(nothing_sampled(one.request, one.params, request_id=name))
        await asyncio.sleep(0)

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """Load new weights once no batch runs, and stay paused; see `AsyncEngine`."""
        was, self._paused = self._paused, True
        try:
            if self._pause_mode == "abort":
                for one in self._batch:
                    one.aborted = True
            runner = self._runner
            if runner is not None:
                await asyncio.shield(runner)
            records: list[TensorRecord] = await self._in_thread(
                lambda: self._engine.update_weights(version, named)
            )
        except BaseException:
            self._paused = was
            self._go_on()
            raise
        return records

    async def release(self, version: int) -> None:
        """Serve again. Raises Conflict where another version is loaded."""
        await self._in_thread(lambda: self._engine.release(version))
        self._paused = False
        self._go_on()

    async def close(self) -> None:
        """Cut the running batch, whose requests raise EngineFailed, and free the engine."""
        if self._closed:
            return
        self._closed = True
        gone = EngineFailed(explain("generating", on=f"engine {self.name}", found="it was closed"))
        for one in [*self._batch, *self._waiting.values()]:
            one.aborted = True
            _fail(one, gone)
        self._waiting.clear()
        if self._runner is not None:
            await asyncio.shield(self._runner)
        await self._in_thread(self._engine.close)
        self._thread.shutdown()


def _fail(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
        one.answer.exception()  # its caller may have been cancelled: nobody else has to hear of it
