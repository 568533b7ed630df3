"""Calling an environment: plain methods in a thread of their own, every call with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

from ledger.errors import EnvironmentFailed
from rollout.environments.protocol import Environment

__all__ = ["Caller"]


class Caller:
    """Calls the methods of one environment, one at a time.

    A plain method that does not return in time cannot be stopped: its thread is left behind, and
    does not keep the process alive. What can hang for good belongs into a process of its own.
    """

    def __init__(self, environment: Environment, *, timeout_s: float) -> None:
        """`timeout_s` of each call."""
        self.environment = environment
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns.

        Raises:
            EnvironmentFailed: it raised (its exception is the cause), or took too long.
        """
        function = getattr(self.environment, method)
        try:
            async with asyncio.timeout(self._timeout_s):
                if not inspect.iscoroutinefunction(function):
                    found = await self._in_thread(function, arguments)
                else:
                    found = await function(*arguments)
                return await found if inspect.isawaitable(found) else found
        except TimeoutError as error:
            raise self._failed(method, f"no answer within {self._timeout_s:g} s") from error
        except Exception as error:
            raise self._failed(method, f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the environment. Raises EnvironmentFailed as `call` does."""
        try:
            await self.call("close")
        finally:
            self._calls.put(None)

    def _failed(self, method: str, found: str) -> EnvironmentFailed:
        # One line: it becomes the reason of a decision.
        line = " ".join(found.split())
        return EnvironmentFailed(f"{method} of environment {self.environment.name!r}: {line}")

    async def _in_thread(self, function: Callable[..., Any], arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                found, error = function(*arguments), None
            except BaseException as raised:
                found, error = None, raised
            loop.call_soon_threadsafe(_give, answer, found, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
            self._thread.start()
        self._calls.put(run)
        return await answer

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            try:
                run()
            except RuntimeError:
                return  # the event loop is closed: nobody waits any more


def _give(answer: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if answer.done():
        return  # its caller gave up
    if error is None:
        answer.set_result(found)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
