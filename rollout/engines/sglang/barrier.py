"""New weights for the engines of a pool: no request is sent meanwhile, and none to an engine that
holds another version than the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ledger.errors import Conflict, EngineFailed, explain
from ledger.events import UNKNOWN_VERSION
from rollout.engines.sglang.member import Member

if TYPE_CHECKING:
    from ledger.events import WeightsLoaded
    from ledger.weights import TensorRecord

__all__ = ["Barrier", "WeightUpdates"]

_log = logging.getLogger(__name__)


class WeightUpdates(Protocol):
    """What brings versions to engines: `rollout.weights.WeightUpdater`. Engines are its own kind of
    object, made by the pool's `control`."""

    unusable: dict[str, str]

    async def update(
        self, engines: Sequence[Any], version: int, named: Any
    ) -> list[TensorRecord]: ...

    def loaded(self) -> list[WeightsLoaded]: ...

    async def release(self, version: int) -> None: ...

    async def restore(self, engine: Any) -> WeightsLoaded | None: ...

    async def sleep(self, engines: Sequence[Any]) -> None: ...

    async def close(self) -> None: ...


class Barrier:
    """Open while requests may be sent. All of the pool's event loop."""

    def __init__(
        self,
        members: Sequence[Member],
        updates: WeightUpdates | None,
        control: Callable[[Member], Any] | None,
        *,
        changed: Callable[[], Awaitable[None]],
        change: Callable[[], Awaitable[None]],
    ) -> None:
        """Closed at first. `changed` tells those that wait for engines, or for the opening;
        `change` waits for the next time that somebody is told."""
        self._members, self._updates, self._control = members, updates, control
        self._changed, self._change = changed, change
        self._controls: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._brought = self._closed = False
        self.is_open = False
        self.version = UNKNOWN_VERSION
        """The version that was brought last; at first what the engines say."""

    @property
    def is_quiet(self) -> bool:
        """Whether no engine is paused, or may be at any moment."""
        return self.is_open and not self._lock.locked()

    async def update(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """As `SGLangPool.update_weights`."""
        updates = self._weight_updates()
        self.is_open = False
        try:
            async with self._serving():
                engines = [self._controlled(m) for m in self._members if m.serves]
                for member in self._members:
                    if member.client is not None:
                        member.client.updates += 1
                try:
                    records = await updates.update(engines, version, named)
                finally:
                    self._condemn_unusable()
                self.version, self._brought = version, True
                return records
        except BaseException:
            self.is_open = True
            await asyncio.shield(self._changed())
            raise

    async def sleep(self) -> None:
        """As `SGLangPool.sleep`."""
        updates = self._weight_updates()
        self.is_open = False
        async with self._lock:
            try:
                await updates.sleep([self._controlled(m) for m in self._members if m.serves])
            finally:
                self._condemn_unusable()

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Hold the engines' weights, once an engine serves. Raises EngineFailed where none will."""
        while True:
            async with self._lock:
                if any(member.serves for member in self._members):
                    yield
                    return
            lost = [m.lost for m in self._members if m.lost is not None]
            if self._closed or len(lost) == len(self._members):
                raise EngineFailed(
                    explain(
                        "updating the weights of engines",
                        expected="an engine that serves",
                        found="closed" if self._closed else "; ".join(lost),
                    )
                )
            await self._change()

    def loaded(self) -> list[WeightsLoaded]:
        """As `SGLangPool.loaded`."""
        return [] if self._updates is None else self._updates.loaded()

    async def release(self, version: int) -> None:
        """As `SGLangPool.release`."""
        updates = self._weight_updates()
        async with self._lock:
            await updates.release(version)
            self._condemn_unusable()
            self.is_open = True
        await self._changed()

    async def bring_back(
        self,
        member: Member,
        on_loaded: Callable[[Sequence[WeightsLoaded]], Awaitable[None]] | None,
    ) -> None:
        """Start an engine again, and give it the version that the others serve, before traffic.

        `on_loaded` stores the event of it before. Raises what `Member.start` and
        `WeightUpdates.restore` raise.
        """
        await member.start()
        async with self._lock:
            if self._brought and self._updates is not None:
                event = await self._updates.restore(self._controlled(member))
                if event is not None and on_loaded is not None:
                    await on_loaded([event])
            member.serves = True
            member.served_from = asyncio.get_running_loop().time()
        _log.warning("engine %s is back", member.address)

    async def close(self) -> None:
        """Give up what updates keep. Engines go on with what they have."""
        self._closed = True
        if self._updates is not None:
            await self._updates.close()
        for control in self._controls.values():
            await control.close()

    def _weight_updates(self) -> WeightUpdates:
        if self._updates is None or self._control is None:
            raise Conflict(
                explain(
                    "updating the weights of engines",
                    expected="a way to bring weights to them",
                    found="engines that were made for sampling alone",
                )
            )
        return self._updates

    def _controlled(self, member: Member) -> Any:
        """What `updates` talks to; one for each address, since it keeps connections."""
        found = self._controls.get(member.address)
        if found is None and self._control is not None:
            found = self._controls[member.address] = self._control(member)
        return found

    def _condemn_unusable(self) -> None:
        """Engines that hold neither the old nor the new version are started again."""
        if self._updates is None:
            return
        for member in self._members:
            why = self._updates.unusable.get(member.address)
            if why is not None and member.serves:
                _log.error("engine %s cannot serve: %s", member.address, why)
                member.serves = False
                member.gone.set()
                member.suspect.set()
