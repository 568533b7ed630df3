"""One engine of a pool: its server, where this process started it, and its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.errors import EngineFailed
from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.launch import EngineProcess

__all__ = ["Member"]


@dataclass(slots=True, eq=False)
class Member:
    """An engine that is launched (`process`) or attached (`url`). All of one event loop."""

    number: int
    connect: Callable[[str], SGLangClient]
    """Makes the client of an address."""
    slots: asyncio.Semaphore
    """One for each request that may run on it at a time."""
    process: EngineProcess | None = None
    url: str | None = None
    client: SGLangClient | None = None
    serves: bool = False
    """Whether it gets traffic."""
    lost: str | None = None
    """Why it never will again."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no server to talk to: its requests are given up."""
    suspect: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where a request found no answer: its health is looked at now."""
    restarts: int = 0
    served_from: float = 0.0
    """Time of the loop at which it began to serve."""

    @property
    def address(self) -> str:
        """Where it listens, or is to listen."""
        if self.client is not None:
            return self.client.address
        return self.url or (self.process.address if self.process is not None else "")

    @property
    def is_local(self) -> bool:
        """Whether this process started it on this host."""
        return self.process is not None

    async def start(self) -> None:
        """Bring its server up where it is ours, and read what it is. It gets no traffic yet.

        Raises:
            EngineFailed: the server does not start, or does not answer.
            InvalidArgument: it serves another model.
        """
        await self.disconnect()
        if self.process is not None:
            await self.process.start(self._answers)
        client = self.connect(self.url or self.address)
        try:
            await client.open()
        except BaseException:
            await client.close()
            raise
        self.client = client
        self.gone.clear()
        self.suspect.clear()

    async def _answers(self, address: str) -> bool:
        client = self.connect(address)
        try:
            await client.health(generate=True, timeout_s=30.0)
        except EngineFailed:
            return False
        finally:
            await client.close()
        return True

    async def disconnect(self) -> None:
        """Give up its connections and whatever runs on it."""
        self.serves = False
        self.gone.set()
        client, self.client = self.client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Disconnect, and end its server where it is ours."""
        await self.disconnect()
        if self.process is not None:
            await self.process.stop()
