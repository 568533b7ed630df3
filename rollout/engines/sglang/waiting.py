"""Waiting for one of several things."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any

from ledger.errors import EngineFailed

__all__ = ["either", "ended", "quietly"]


async def either(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> bool:
    """Wait for the first of two; whether `first` has ended. The other one is cancelled."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        await ended(*tasks)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait for its end; what it raises is nobody's business."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def quietly(work: Awaitable[None]) -> None:
    """Do what an engine that is gone need not do any more."""
    with contextlib.suppress(EngineFailed):
        await work
