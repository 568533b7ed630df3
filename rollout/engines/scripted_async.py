"""An asynchronous engine without a model, for tests of what stands around engines. Never for
training.

Time stands still until a test moves it: a request gives one token every `token_s` of its clock, so
that a test says "abort when it has three tokens" and means exactly three.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ledger.errors import Conflict, EngineFailed, InvalidArgument, explain
from ledger.events import UNKNOWN_VERSION
from rollout.engines.scripted import Script, ScriptedEngine, uniform_script
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams, check_request

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["Failure", "ManualClock", "ScriptedAsyncEngine", "length_script", "trace_lengths"]

Lengths = Callable[[GenerationRequest], int]
"""New tokens that a request gets before its end, the stop id included."""


class ManualClock:
    """Seconds that pass when `advance` says so."""

    def __init__(self) -> None:
        """At 0."""
        self.now = 0.0
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been moved by `seconds`."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), future))
        await future

    def next_due(self) -> float | None:
        """When the next sleeper wakes; None where nobody sleeps."""
        while self._due and self._due[0][2].done():
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    async def advance(self, seconds: float) -> None:
        """Move the clock; everybody whose time comes wakes in the order of their times.

        Each of them runs until it waits again before the next one wakes.
        """
        until = self.now + seconds
        await _settle()
        while (due := self.next_due()) is not None and due <= until + 1e-9:
            self.now = max(self.now, due)
            heapq.heappop(self._due)[2].set_result(None)
            await _settle()
        self.now = until

    async def advance_to_next(self) -> bool:
        """Move the clock to the next sleeper's time; False where nobody sleeps."""
        await _settle()
        due = self.next_due()
        if due is None:
            return False
        await self.advance(max(0.0, due - self.now))
        return True

    async def until(self, condition: Callable[[], bool], *, limit_s: float = 30.0) -> None:
        """Let others run, without moving the clock, until `condition` holds.

        Raises:
            TimeoutError: it does not within `limit_s` of real time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"the condition did not hold within {limit_s} s")
            await asyncio.sleep(0.0005)  # gives the threads that others wait for a turn


async def _settle() -> None:
    """Let everything that can run without waiting run."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine call that is to go wrong."""

    error: Exception
    after_tokens: int = 0
    """Tokens that are sampled, and lost, before it does."""


def length_script(lengths: Lengths, *, vocab_size: int = 64) -> Script:
    """Ids chosen by (seed, position) among those that do not stop; the last one is a stop id.

    A request that needs more than `max_new_tokens` is cut there. The same sample gets the same ids
    whether it is interrupted or not, as long as `lengths` counts by its context.
    """

    def script(
        request: GenerationRequest, params: SamplingParams
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        stop = list(params.stop_token_ids)
        free = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), stop)
        picks, _ = uniform_script(len(free))(request, params)
        tokens = free[picks]
        end = max(1, lengths(request))
        if end <= len(tokens):
            tokens = tokens[:end]
            if stop:
                tokens[-1] = stop[0]
        return tokens, np.full(len(tokens), -np.log(vocab_size), dtype=np.float32)

    return script


def trace_lengths(trace: Sequence[int], *, prompt_tokens: int) -> Lengths:
    """Response lengths by `index` (again from the start where the trace ends).

    Every prompt has `prompt_tokens` tokens; what a context has beyond them counts as answered.
    """

    def lengths(request: GenerationRequest) -> int:
        return trace[request.index % len(trace)] - (len(request.tokens) - prompt_tokens)

    return lengths


@dataclass(slots=True, eq=False)
class _Running:
    """A request between its start and its end."""

    request: GenerationRequest
    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    finish_reason: str
    failure: Failure | None
    over: asyncio.Future[str]
    """'done', 'abort', or an exception."""
    began: float
    started: bool = False
    """Has one of the engine's `max_running` places."""
    emitted: int = 0
    since: float = 0.0
    """Time at which it had `emitted` tokens; meaningless while it stands."""
    timer: asyncio.Task[None] | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)


class ScriptedAsyncEngine:
    """Says what its script says, one token each `token_s`, under the promises of `AsyncEngine`.

    A pause for new weights stops every request where it stands; after `release` each goes on under
    the new version (`pause_mode` 'in_place'), or it ends there with finish_reason 'abort'.
    """

    name = "scripted"
    version = "1"

    def __init__(
        self,
        script: Script | None = None,
        *,
        clock: ManualClock | None = None,
        token_s: float = 1.0,
        max_running: int | None = None,
        failures: Callable[[GenerationRequest, int], Failure | None] | None = None,
        vocab_size: int = 64,
        max_positions: int = 1 << 20,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
        weight_version: int = UNKNOWN_VERSION,
        pause_mode: str = "in_place",
        routing: tuple[int, int, int] | None = None,
        address: str = "scripted://0",
    ) -> None:
        """`clock` None: every answer is there at once. `max_running` None: no request waits for
        another. `failures(request, attempt)`: how call number `attempt` (from 0) for that index is
        to fail; None: not at all. `routing`: (layers, topk, experts) of a mixture of experts.
        """
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.requests: list[GenerationRequest] = []
        """Every request that was not refused, in the order of arrival."""
        self._script = script or uniform_script(vocab_size)
        self._clock, self._token_s = clock, token_s if clock is not None else 0.0
        self._max_running, self._failures = max_running, failures
        self._inner = ScriptedEngine(weights=weights, weight_version=weight_version)
        self._pause_mode, self._routing, self._address = pause_mode, routing, address
        self._live: dict[str, _Running] = {}
        self._attempts: dict[int, int] = {}
        self._paused = self._closed = self._dead = False
        self._names = itertools.count()

    @property
    def weight_version(self) -> int:
        """The version that is loaded."""
        return self._inner.weight_version

    @property
    def running(self) -> dict[str, int]:
        """Tokens that each request in the engine has by now, by its name."""
        for live in self._live.values():
            self._count(live)
        return {rid: live.emitted for rid, live in self._live.items()}

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """Answer from the script; see `rollout.protocol.AsyncEngine`.

        Raises:
            Conflict: the engine is closed, or a request of the same name is running.
        """
        check_request(request, params, vocab_size=self.vocab_size, max_positions=self.max_positions)
        rid = request.request_id or f"scripted-{next(self._names)}"
        if self._closed or rid in self._live:
            raise Conflict(
                explain(
                    "generating",
                    on=f"engine {self.name}, request {rid}",
                    expected="an open engine, and a name that no running request has",
                    found="closed" if self._closed else "the name of a running request",
                )
            )
        if self._dead:
            raise self._died(rid)
        self.requests.append(request)
        attempt = self._attempts.get(request.index, 0)
        self._attempts[request.index] = attempt + 1
        tokens, log_probs = self._script(request, params)
        ends = np.flatnonzero(np.isin(tokens, params.stop_token_ids))
        new = int(ends[0]) + 1 if len(ends) else len(tokens)
        stopped = bool(len(ends)) and new <= params.max_new_tokens
        new = min(new, params.max_new_tokens)
        live = _Running(
            request=request,
            tokens=tokens[:new].astype(np.int32),
            log_probs=log_probs[:new].astype(np.float32),
            finish_reason="stop" if stopped or new < params.max_new_tokens else "length",
            failure=None if self._failures is None else self._failures(request, attempt),
            over=asyncio.get_running_loop().create_future(),
            began=self._now(),
        )
        self._live[rid] = live
        try:
            self._start_waiting()
            await live.over
        finally:
            self._stop_timer(live)
            self._live.pop(rid, None)
            self._start_waiting()
        return self._result(rid, live, params)

    def _died(self, rid: str) -> EngineFailed:
        return EngineFailed(
            explain("generating", on=f"engine {self._address}, request {rid}", found="it is dead")
        )

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock.now

    def _start_waiting(self) -> None:
        """Give free places to those that wait longest."""
        if self._paused:
            return
        started = sum(live.started for live in self._live.values())
        for live in self._live.values():
            if self._max_running is not None and started >= self._max_running:
                return
            if not live.started and not live.over.done():
                live.started = True
                started += 1
                self._go_on(live)

    def _go_on(self, live: _Running) -> None:
        live.since = self._now()
        goal = len(live.tokens)
        if live.failure is not None:
            goal = min(goal, live.failure.after_tokens)
        live.timer = asyncio.get_running_loop().create_task(self._run(live, goal))

    async def _run(self, live: _Running, goal: int) -> None:
        if self._clock is not None and goal > live.emitted:
            await self._clock.sleep((goal - live.emitted) * self._token_s)
        if live.over.done():
            return
        self._count(live, goal)
        if live.failure is not None:
            live.over.set_exception(live.failure.error)
        else:
            live.over.set_result("done")

    def _count(self, live: _Running, reached: int | None = None) -> None:
        """Add the tokens sampled since the last count, under the version that is loaded."""
        if reached is None:
            if not live.started or self._paused or self._token_s == 0:
                return
            whole = int((self._now() - live.since) / self._token_s + 1e-9)
            reached = min(len(live.tokens), live.emitted + whole)
            live.since += (reached - live.emitted) * self._token_s
        if reached > live.emitted:
            version = self.weight_version
            if live.spans and live.spans[-1][2] == version:
                live.spans[-1] = (live.spans[-1][0], reached, version)
            else:
                live.spans.append((live.emitted, reached, version))
            live.emitted = reached

    def _stop_timer(self, live: _Running) -> None:
        if live.timer is not None:
            live.timer.cancel()
            live.timer = None

    def _result(self, rid: str, live: _Running, params: SamplingParams) -> GenerationResult:
        request, new = live.request, live.emitted
        spans = np.array(live.spans, dtype=np.int64).reshape(-1, 3)
        experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None
        if self._routing is not None:
            layers, topk, num_experts = self._routing
            whole = np.concatenate([request.tokens, live.tokens[:new]]).astype(np.int64)
            first = request.routing_start
            position = np.arange(first, max(first, len(whole) - 1))
            ids = (whole[position] * 7 + position)[:, None, None] + np.arange(layers)[:, None]
            ids = (ids + np.arange(topk)) % num_experts
            experts = ids.astype(np.uint8) if num_experts <= 256 else ids.astype(np.uint16)
        return GenerationResult(
            index=request.index,
            tokens=live.tokens[:new].copy(),
            log_probs=live.log_probs[:new].copy(),
            sampler_log_probs=None,
            logprob_mode="full",
            logprob_temperature=params.logprob_temperature,
            # An abort that comes with the last token comes too late.
            finish_reason="abort" if new < len(live.tokens) else live.finish_reason,
            span_starts=spans[:, 0].astype(np.int32),
            span_ends=spans[:, 1].astype(np.int32),
            span_versions=spans[:, 2].copy(),
            expert_ids=experts,
            num_experts=0 if self._routing is None else self._routing[2],
            time_s=self._now() - live.began,
            request_id=rid,
            report={"id": rid},
            engine_address=self._address,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests where they stand; see `AsyncEngine`."""
        for rid in list(self._live) if request_ids is None else request_ids:
            live = self._live.get(rid)
            if live is not None and not live.over.done():
                self._count(live)
                self._stop_timer(live)
                live.over.set_result("abort")
        await asyncio.sleep(0)

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """Stop everything where it stands, load, stay paused; see `AsyncEngine`."""
        if self._pause_mode == "abort":
            await self.abort()
        for live in self._live.values():
            self._count(live)
            self._stop_timer(live)
        was, self._paused = self._paused, True
        try:
            return self._inner.update_weights(version, named)
        except InvalidArgument:
            self._paused = was
            self._resume()
            raise

    async def release(self, version: int) -> None:
        """Go on under `version`. Raises Conflict where another one is loaded."""
        self._inner.release(version)
        self._paused = False
        self._resume()

    def _resume(self) -> None:
        if self._paused:
            return
        for live in self._live.values():
            if live.started and not live.over.done():
                self._go_on(live)
        self._start_waiting()

    def kill(self) -> None:
        """Die: every request fails with EngineFailed, and so do new ones until `revive`."""
        self._dead = True
        for rid, live in self._live.items():
            if not live.over.done():
                self._stop_timer(live)
                live.over.set_exception(self._died(rid))

    def revive(self) -> None:
        """Serve again after `kill`."""
        self._dead = False

    async def close(self) -> None:
        """Refuse everything from now on; what runs fails with EngineFailed."""
        self.kill()
        self._closed = True
