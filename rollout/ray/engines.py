"""Several engine actors as one engine: sessions stay with theirs, what a dead one had goes on.

A request is answered by one engine, or not at all: what was asked of an engine that died is asked
again, of another or of the same one started anew, and nothing is recorded before there is an
answer. An engine that was started anew gets no traffic before it has the version that the others
serve, its own checksums were compared, and that is on record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ledger.errors import Diverged, EngineFailed, LedgerError, explain
from ledger.events import UNKNOWN_VERSION, WeightsLoaded
from ledger.weights import TensorRecord, first_difference, weights_root
from rollout.engines.sglang.affinity import HashRing
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from rollout.published import Published, PublishedTensors
from rollout.ray.engine_actor import Loaded, NotServing

__all__ = ["RayEngines"]

_LOOK_S = 0.2
"""Between two looks at an actor that is being started anew."""
_Source = Published | Any
"""A version in its folders, or in Ray's object store."""


class RayEngines:
    """An `AsyncEngine` over actors. All calls come from one event loop.

    One process supervises the engines: it brings them weights. Others only ask them, and learn from
    their answers which of them serve.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        *,
        name: str,
        version: str,
        supervises: bool = False,
        patience_s: float = 300.0,
    ) -> None:
        """`actors`: name → handle of an `EngineActor`. `patience_s` is how long a request waits for
        any engine to serve."""
        self.name, self.version = name, version
        self.on_loaded: Callable[[Sequence[WeightsLoaded]], Awaitable[None]] | None = None
        self.restarts = 0
        """Engines that were given the version again after they died."""
        self._names, self._actors = list(actors), list(actors.values())
        self._supervises = supervises
        self._patience_s = patience_s
        self._ring = HashRing(self._names)
        self._serving = set(range(len(self._actors)))
        self._back = asyncio.Event()
        self._watched: dict[int, asyncio.Task[None]] = {}
        """Of engines that do not serve: what brings them back."""
        self._alive: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[str | None, int] = {}
        """Request → the engine that has it."""
        self._aborted: set[str] = set()
        self._updating = asyncio.Lock()
        self._served: tuple[int, _Source] | None = None
        self._pending: tuple[int, _Source, dict[int, Loaded]] | None = None

    @property
    def weight_version(self) -> int:
        """The version that was released last by this process."""
        return UNKNOWN_VERSION if self._served is None else self._served[0]

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """As `AsyncEngine.generate`."""
        import ray

        until = time.monotonic() + self._patience_s
        key = request.session_id or str(request.index)
        try:
            while True:
                number = self._ring.owner(key, self._serving)
                if number is None:
                    await self._wait_for_any(until, request)
                    continue
                if request.request_id in self._aborted:
                    return _nothing(request, params)
                self._asked[request.request_id] = number
                try:
                    answer: GenerationResult = await self._actors[number].generate.remote(
                        request, params
                    )
                    return answer
                except ray.exceptions.RayTaskError as error:
                    if not isinstance(error.cause, NotServing):
                        raise error.cause from None
                except ray.exceptions.RayActorError:
                    pass
                self._lose(number)
        except asyncio.CancelledError:
            await asyncio.shield(self.abort([request.request_id or ""]))
            raise
        finally:
            self._asked.pop(request.request_id, None)
            self._aborted.discard(request.request_id or "")

    async def _wait_for_any(self, until: float, request: GenerationRequest) -> None:
        self._back.clear()
        try:
            await asyncio.wait_for(self._back.wait(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise EngineFailed(
                explain(
                    "asking an engine",
                    on=f"sample {request.index}",
                    expected=f"one of {', '.join(self._names)} to serve",
                    found=f"none within {self._patience_s:g} s",
                    do="see why their actors die: Ray's logs (/tmp/ray/session_latest/logs)",
                )
            ) from None

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As `AsyncEngine.abort`."""
        ids = [one for one in self._asked if one] if request_ids is None else list(request_ids)
        by_engine: dict[int, list[str]] = {}
        for one in ids:
            if one in self._asked:
                # Where its engine dies now, it is not asked again.
                self._aborted.add(one)
                by_engine.setdefault(self._asked[one], []).append(one)
        await asyncio.gather(
            *(self._actors[n].abort.remote(names) for n, names in by_engine.items()),
            return_exceptions=True,
        )

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """As `AsyncEngine.update_weights`, for every engine that serves.

        What is in folders (`PublishedTensors`) each engine reads from there. Raises EngineFailed
        where no engine took it, and Diverged where two hold different bits: engines that did not
        are started anew, and get the version that is served.
        """
        import ray

        self._watch_all()
        async with self._updating:
            source: _Source = (
                named.published if isinstance(named, PublishedTensors) else ray.put(dict(named))
            )
            numbers = sorted(self._serving)
            answers = await asyncio.gather(
                *(self._actors[n].load.remote(version, source) for n in numbers),
                return_exceptions=True,
            )
            taken: dict[int, Loaded] = {}
            problem: BaseException | None = None
            for number, answer in zip(numbers, answers, strict=True):
                if isinstance(answer, Loaded):
                    taken[number] = answer
                elif isinstance(answer, ray.exceptions.RayTaskError):
                    problem = answer.cause
                elif isinstance(answer, ray.exceptions.RayActorError):
                    self._lose(number)
                else:
                    problem = answer
            for loaded in taken.values():
                difference = first_difference(next(iter(taken.values())).records, loaded.records)
                if difference is not None:
                    problem = Diverged(
                        explain(
                            "loading engines",
                            on=f"version {version}",
                            expected="the same bits in all of them",
                            found=difference,
                        )
                    )
            if problem is not None:
                for number in numbers:
                    self._start_anew(number)
                raise problem
            if not taken:
                raise EngineFailed(
                    explain(
                        "loading engines",
                        on=f"version {version}",
                        expected="an engine that lives",
                        found="none",
                        do="start the command again",
                    )
                )
            self._pending = version, source, taken
            return next(iter(taken.values())).records

    async def release(self, version: int) -> None:
        """As `AsyncEngine.release`; what `loaded` says must be on record before."""
        if self._pending is None or self._pending[0] != version:
            raise EngineFailed(
                explain(
                    "releasing engines",
                    expected=f"version {version}, loaded before",
                    found=None if self._pending is None else self._pending[0],
                )
            )
        _, source, taken = self._pending
        self._served, self._pending = (version, source), None
        import ray

        answers = await asyncio.gather(
            *(self._actors[n].release.remote(version) for n in taken), return_exceptions=True
        )
        for number, answer in zip(taken, answers, strict=True):
            if isinstance(answer, ray.exceptions.RayActorError):
                self._lose(number)
            elif isinstance(answer, BaseException):
                raise answer

    def loaded(self) -> list[WeightsLoaded]:
        """How each engine took the version that waits for its release."""
        if self._pending is None:
            return []
        reason = "restored" if self._served is None else "published"
        return [self._event(number, one, reason) for number, one in self._pending[2].items()]

    def _event(self, number: int, loaded: Loaded, reason: str) -> WeightsLoaded:
        address = f"ray:{self._names[number]}"
        for told in loaded.told:
            return told.evolve(engine_address=address, reason=reason)
        return WeightsLoaded(
            weight_version=loaded.version,
            engine=self.name,
            engine_address=address,
            transport=loaded.transport,
            pause_mode="idle",
            sent_tensors=len(loaded.records),
            sent_bytes=loaded.sent_bytes,
            root=weights_root(loaded.records),
            compared="blake3 of every tensor as the engine holds it",
            transfer_time_s=loaded.transfer_time_s,
            reason=reason,
            cache_flushed=True,
        )

    def _watch_all(self) -> None:
        """Hear of the death of every engine, also of one that this process asks nothing."""
        for number in range(len(self._actors)):
            if self._supervises and number not in self._alive:
                self._alive[number] = asyncio.create_task(self._watch(number))

    async def _watch(self, number: int) -> None:
        import ray

        while True:
            try:
                await self._actors[number].live.remote()
            except ray.exceptions.RayActorError:
                self._lose(number)
                await asyncio.wait([self._watched[number]])

    def _lose(self, number: int) -> None:
        """An engine died, or has no weights: it gets no traffic until it serves again."""
        self._serving.discard(number)
        if number in self._watched and not self._watched[number].done():
            return
        work = self._restore(number) if self._supervises else self._look_for(number)
        self._watched[number] = asyncio.create_task(work)

    def _start_anew(self, number: int) -> None:
        import ray

        ray.kill(self._actors[number], no_restart=False)
        self._lose(number)

    async def _look_for(self, number: int) -> None:
        """Until an engine that somebody else looks after serves again."""
        import ray

        while True:
            try:
                if await self._actors[number].serving.remote() is not None:
                    break
            except ray.exceptions.RayActorError:
                pass
            await asyncio.sleep(_LOOK_S)
        self._serving.add(number)
        self._back.set()

    async def _restore(self, number: int) -> None:
        """Give an engine that Ray has started anew the version that the others serve."""
        import ray

        while True:
            try:
                async with self._updating:
                    if await self._bring_served(number):
                        return
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, LedgerError):
                    raise
            except ray.exceptions.RayActorError:
                pass
            await asyncio.sleep(_LOOK_S)

    async def _bring_served(self, number: int) -> bool:
        """Whether an engine serves now. Between an update and its release none does."""
        if self._served is None or self._pending is not None:
            return False
        version, source = self._served
        loaded: Loaded = await self._actors[number].load.remote(version, source)
        if isinstance(source, Published):
            difference = first_difference(source.records, loaded.records)
            if difference is not None:
                raise Diverged(
                    explain("restoring an engine", on=self._names[number], found=difference)
                )
        if self.on_loaded is not None:
            await self.on_loaded([self._event(number, loaded, "restored")])
        await self._actors[number].release.remote(version)
        self.restarts += 1
        self._serving.add(number)
        self._back.set()
        return True

    async def close(self) -> None:
        """End what watches the engines; the actors are whoever's started them."""
        tasks = [*self._alive.values(), *self._watched.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing(request: GenerationRequest, params: SamplingParams) -> GenerationResult:
    """The answer to a request that was aborted while no engine had it."""
    return GenerationResult(
        index=request.index,
        tokens=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        sampler_log_probs=None,
        logprob_mode=params.logprob_mode,
        logprob_temperature=params.logprob_temperature,
        finish_reason="abort",
        span_starts=np.zeros(0, np.int32),
        span_ends=np.zeros(0, np.int32),
        span_versions=np.zeros(0, np.int64),
    )
