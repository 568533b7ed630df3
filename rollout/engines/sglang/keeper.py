"""Looking after the engines of a pool: which of them died or hangs, and bringing them back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ledger.errors import EngineFailed, LedgerError
from rollout.engines.sglang.member import Member
from rollout.engines.sglang.waiting import ended

__all__ = ["Keeper", "PoolSettings"]

_log = logging.getLogger(__name__)
_STEADY_S = 600.0
"""An engine that served so long may be started again as often as at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How requests are tried and servers looked after."""

    attempts: int = 4
    """Times that a request is sent, the first included, before it fails."""
    backoff_s: float = 0.5
    """Before the second attempt; twice as long before each further one."""
    health_interval_s: float = 30.0
    health_timeout_s: float = 60.0
    """After which a server that does not answer counts as hung; twice in a row, and it is ended."""
    restarts: int = 3
    """Of one server, before it is given up. One that is attached is waited for, unless it is 0."""
    patience_s: float = 1800.0
    """How long a request waits for a server that serves, before it fails."""


class Keeper:
    """Looks after one engine. All of the pool's event loop."""

    def __init__(
        self,
        member: Member,
        settings: PoolSettings,
        *,
        bring_back: Callable[[Member], Awaitable[None]],
        runs_its_model: Callable[[], bool],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`bring_back` makes the engine serve again. `runs_its_model`: whether it can be asked to
        generate, which a paused one does not. `changed` tells those that wait for an engine."""
        self._member, self._settings = member, settings
        self._bring_back, self._runs_its_model, self._changed = bring_back, runs_its_model, changed

    async def keep(self) -> None:
        """Go on until the engine is lost, or until this is cancelled."""
        member = self._member
        try:
            while member.lost is None:
                await self._one_life()
        except Exception as error:
            _log.exception("engine %s is not looked after any more", member.address)
            member.serves, member.lost = False, f"{type(error).__name__}: {error}"
            await self._changed()

    async def _one_life(self) -> None:
        member, settings = self._member, self._settings
        why = await self._trouble()
        _log.error("engine %s is given up: %s", member.address, why)
        await member.disconnect()
        if asyncio.get_running_loop().time() - member.served_from > _STEADY_S:
            member.restarts = 0
        while not member.serves and (
            member.restarts < settings.restarts or (member.url is not None and settings.restarts)
        ):
            member.restarts += 1
            try:
                await self._bring_back(member)
            except LedgerError as error:
                why = str(error)
                _log.error("engine %d was not brought back: %s", member.number, error)
                await member.close()
                await asyncio.sleep(
                    settings.backoff_s if member.url is None else settings.health_interval_s
                )
        if not member.serves:
            member.lost = why
        await self._changed()

    async def _trouble(self) -> str:
        """Return, with the reason, when the engine cannot be used any more."""
        member, settings, missed = self._member, self._settings, 0
        process = member.process
        over = asyncio.ensure_future(process.wait() if process else asyncio.Event().wait())
        try:
            while True:
                if missed == 0:
                    await self._next_look(over)
                if over.done():
                    return f"its server ended: {over.result()}"
                if member.client is None or member.gone.is_set():
                    return "it holds no version that may be served"
                try:
                    await member.client.health(
                        generate=self._runs_its_model(), timeout_s=settings.health_timeout_s
                    )
                    missed = 0
                except EngineFailed as error:
                    missed += 1
                    if missed == 2 and not over.done():
                        return str(error)
                    await asyncio.wait([over], timeout=min(1.0, settings.backoff_s))
        finally:
            await ended(over)

    async def _next_look(self, over: asyncio.Future[Any]) -> None:
        """Wait for the interval, or until something seems wrong."""
        asleep = asyncio.ensure_future(asyncio.sleep(self._settings.health_interval_s))
        suspect = asyncio.ensure_future(self._member.suspect.wait())
        try:
            await asyncio.wait([over, asleep, suspect], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(asleep, suspect)
        self._member.suspect.clear()
