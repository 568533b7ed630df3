"""Several SGLang servers as one `AsyncEngine`: sessions stay where their prefix is, a request that
found no answer is sent again, and a server that died is started again and given its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ledger.errors import Conflict, EngineFailed, explain
from rollout.engines.sglang.affinity import HashRing
from rollout.engines.sglang.barrier import Barrier, WeightUpdates
from rollout.engines.sglang.client import Refused, Unreachable
from rollout.engines.sglang.keeper import Keeper, PoolSettings
from rollout.engines.sglang.member import Member
from rollout.engines.sglang.model import ModelFacts
from rollout.engines.sglang.request import wire_rid
from rollout.engines.sglang.waiting import either, ended, quietly
from rollout.protocol import (
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    nothing_sampled,
)

if TYPE_CHECKING:
    from ledger.events import WeightsLoaded
    from ledger.weights import TensorRecord

__all__ = ["SGLangPool"]

_log = logging.getLogger(__name__)
_LONGEST_BACKOFF_S = 15.0
_AGAIN_S = 1.0
"""After which an abort is said again: a server forgets one for a request that it has not begun."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way, however often it is sent."""

    name: str
    request: GenerationRequest
    params: SamplingParams
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    sent: tuple[Member, str] | None = None
    """Where it runs now, and under which name."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class SGLangPool:
    """An `AsyncEngine`. All of one event loop; `start` comes first."""

    name = "sglang"

    def __init__(
        self,
        members: Sequence[Member],
        settings: PoolSettings | None = None,
        *,
        model: ModelFacts,
        updates: WeightUpdates | None = None,
        control: Callable[[Member], Any] | None = None,
        on_loaded: Callable[[Sequence[WeightsLoaded]], Awaitable[None]] | None = None,
    ) -> None:
        """`control` makes, of a member, what `updates` talks to. `on_loaded` stores the event of a
        server that was started again and given its weights, before it gets traffic."""
        self._members = list(members)
        self.model = model
        self._settings = settings or PoolSettings()
        self.on_loaded = on_loaded
        self._ring = HashRing([f"engine-{member.number}" for member in members])
        self._calls: dict[str, _Call] = {}
        # Servers that are attached may have other clients.
        self._names = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._changed = asyncio.Condition()
        self._barrier = Barrier(
            self._members,
            updates,
            control,
            changed=self._tell_change,
            change=lambda: self._change(self._settings.health_interval_s),
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.version = ""
        """Of SGLang; known after `start`."""

    @property
    def members(self) -> Sequence[Member]:
        """The engines, by number."""
        return self._members

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids at which engines end a response besides those that a request names."""
        return self.model.end_token_ids

    @property
    def weight_version(self) -> int:
        """The version that new requests are served with."""
        return self._barrier.version

    @property
    def is_paused(self) -> bool:
        """Whether an update waits for its release."""
        return not self._barrier.is_open

    async def start(self) -> None:
        """Bring all servers up, and look after them from now on.

        Raises:
            EngineFailed, InvalidArgument: the first server that cannot be used; none is left.
        """
        starting = [asyncio.ensure_future(member.start()) for member in self._members]
        try:
            await asyncio.gather(*starting)
            versions = {m.client.server.version for m in self._members if m.client is not None}
            loaded = {await m.client.weight_version() for m in self._members if m.client}
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise
        self.version = ", ".join(sorted(versions))
        if len(loaded) == 1:
            self._barrier.version = loaded.pop()
        for member in self._members:
            member.serves = True
            keeper = Keeper(
                member,
                self._settings,
                bring_back=self._bring_back,
                runs_its_model=lambda: self._barrier.is_quiet,
                changed=self._tell_change,
            )
            self._spawn(keeper.keep())
        self._barrier.is_open = True

    # Requests.

    def check(self, request: GenerationRequest, params: SamplingParams) -> None:
        """Raises InvalidArgument for a request that the model cannot take."""
        for member in self._members:
            if member.client is not None:
                member.client.check(request, params)
                return

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """Continue one sample; see `rollout.protocol.AsyncEngine`.

        Raises also Conflict: the pool is closed, or a request of the same name is running.
        """
        self.check(request, params)
        name = request.request_id or next(self._names)
        if self._closed or name in self._calls:
            raise Conflict(
                explain(
                    "generating",
                    on=f"engine {self.name}, request {name}",
                    expected="an open engine, and a name that no running request has",
                    found="closed" if self._closed else "the name of a running request",
                )
            )
        call = self._calls[name] = _Call(name, request, params)
        try:
            return await self._run(call)
        finally:
            call.over.set()
            del self._calls[name]

    async def _run(self, call: _Call) -> GenerationResult:
        failures: list[str] = []
        avoid: Member | None = None
        for attempt in range(self._settings.attempts):
            if attempt:
                wait_s = min(self._settings.backoff_s * 2 ** (attempt - 1), _LONGEST_BACKOFF_S)
                await either(asyncio.sleep(wait_s), call.aborted.wait())
            member = await self._place(call, avoid)
            if member is None:
                return nothing_sampled(call.request, call.params, request_id=call.name)
            try:
                return await self._ask(member, call, attempt)
            except Refused as error:
                if "Duplicate request ID" not in str(error):
                    raise
                failures.append(str(error))
            except EngineFailed as error:
                failures.append(str(error))
                if isinstance(error, Unreachable):
                    member.suspect.set()
            finally:
                member.slots.release()
            avoid = member
            _log.warning("request %s: attempt %d failed: %s", call.name, attempt + 1, failures[-1])
        raise EngineFailed(
            explain(
                "generating",
                on=f"request {call.name}",
                expected=f"an answer within {self._settings.attempts} attempts",
                found="\n".join(failures),
            )
        )

    async def _place(self, call: _Call, avoid: Member | None) -> Member | None:
        """A place on an engine that takes requests, to be released; None: the call was aborted."""
        while (member := await self._member_for(call, avoid)) is not None:
            got = await _acquired(member, call)
            if got and self._barrier.is_open and member.serves and not call.aborted.is_set():
                return member
            if got:
                member.slots.release()
        return None

    async def _member_for(self, call: _Call, avoid: Member | None) -> Member | None:
        """Where the call goes, once some engine takes requests; None where it was aborted."""
        key = call.request.session_id or call.name
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.patience_s
        while not call.aborted.is_set():
            if not self._barrier.is_open:
                # New weights may take as long as they like.
                deadline = clock() + self._settings.patience_s
            else:
                serving = {m.number for m in self._members if m.serves}
                if avoid is not None and len(serving) > 1:
                    serving.discard(avoid.number)
                number = self._ring.owner(key, serving)
                if number is not None:
                    return self._members[number]
            lost = [m.lost for m in self._members if m.lost is not None]
            left_s = deadline - clock()
            if self._closed or len(lost) == len(self._members) or left_s <= 0:
                raise EngineFailed(
                    explain(
                        "generating",
                        on=f"request {call.name}",
                        expected="an engine that serves",
                        found="; ".join(lost) or "none" + (": closed" if self._closed else ""),
                    )
                )
            await either(self._change(left_s), call.aborted.wait())
        return None

    async def _change(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, member: Member, call: _Call, attempt: int) -> GenerationResult:
        client = member.client
        if client is None or not member.serves:
            raise Unreachable(explain("asking an engine", on=member.address, found="it is gone"))
        rid = wire_rid(call.name, attempt)
        call.sent = (member, rid)
        asking = asyncio.ensure_future(client.generate(call.request, call.params, rid=rid))
        gone = asyncio.ensure_future(member.gone.wait())
        try:
            if call.aborted.is_set():
                self._spawn(self._abort(call))
            await asyncio.wait([asking, gone], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise Unreachable(
                explain(
                    "asking an engine",
                    on=f"request {rid}, engine {client.address}",
                    found="it was given up while the request ran",
                )
            )
        except (EngineFailed, asyncio.CancelledError):
            # Nobody listens any more: what still runs there must not go on.
            if not member.gone.is_set():
                self._spawn(quietly(client.abort(rid)))
            raise
        finally:
            call.sent = None
            await ended(asking, gone)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests with what they have; see `rollout.protocol.AsyncEngine`."""
        names = list(self._calls) if request_ids is None else request_ids
        calls = [self._calls[name] for name in names if name in self._calls]
        telling = []
        for call in calls:
            if not call.aborted.is_set():
                call.aborted.set()
                if call.sent is not None:
                    telling.append(self._spawn(self._abort(call, at_once=request_ids is not None)))
        if request_ids is None:
            # Servers of this pool's own have no other requests.
            own = [m.client for m in self._members if m.is_local and m.client is not None]
            await asyncio.gather(*(quietly(client.abort()) for client in own))
        await asyncio.sleep(0)

    async def _abort(self, call: _Call, *, at_once: bool = True) -> None:
        """Say it until the request is over."""
        if call.sent is not None and not at_once and call.sent[0].is_local:
            await either(asyncio.sleep(_AGAIN_S), call.over.wait())
        while not call.over.is_set() and call.sent is not None:
            member, rid = call.sent
            if member.client is None:
                return
            await quietly(member.client.abort(rid))
            await either(asyncio.sleep(_AGAIN_S), call.over.wait())

    # Weights.

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """Bring a version to all engines that serve, which stay paused; see `AsyncEngine`.

        An engine that is being started again gets it before it serves. Raises what `updates`
        raises; then the old version is served, as it promises. Raises also Conflict where the pool
        was made without `updates`, and EngineFailed where no engine is left.
        """
        return await self._barrier.update(version, named)

    async def sleep(self) -> None:
        """Give the engines' GPU memory back until the next update; requests wait.

        Raises what `updates` raises.
        """
        await self._barrier.sleep()

    def loaded(self) -> list[WeightsLoaded]:
        """The events of the update that waits for `release`: to be stored before it."""
        return self._barrier.loaded()

    async def release(self, version: int) -> None:
        """Serve the version that was brought last. Raises Conflict where it is another one."""
        await self._barrier.release(version)

    # Servers.

    async def _bring_back(self, member: Member) -> None:
        await self._barrier.bring_back(member, self.on_loaded)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End the servers that this pool started; requests that still run raise EngineFailed."""
        self._closed = True
        await self._tell_change()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._barrier.close()
        await asyncio.gather(*(member.close() for member in self._members))

    def describe(self) -> Mapping[str, Any]:
        """Addresses, process ids and logs, for a person or a log."""
        return {
            str(m.number): {
                "address": m.address,
                "pid": None if m.process is None else m.process.pid,
                "log": None if m.process is None else str(m.process.plan.log),
            }
            for m in self._members
        }


async def _acquired(member: Member, call: _Call) -> bool:
    """Wait for a place on an engine; False where the call was aborted, or the engine is gone."""
    if not member.slots.locked():
        await member.slots.acquire()  # without a wait
        return True
    acquiring = asyncio.ensure_future(member.slots.acquire())
    others = [asyncio.ensure_future(event.wait()) for event in (call.aborted, member.gone)]
    try:
        await asyncio.wait([acquiring, *others], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if acquiring.done():
            member.slots.release()
        raise
    finally:
        # Not waited for: a place that was given must not be lost to a cancellation meanwhile.
        got = acquiring.done()
        for task in (acquiring, *others):
            task.cancel()
    return got
