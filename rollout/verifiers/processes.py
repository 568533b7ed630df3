"""Verifiers in processes of their own: with a time limit that holds whatever they do."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, LifoQueue
from threading import BoundedSemaphore
from typing import Any

from ledger.errors import MissingDependency, RewardFailed, explain

__all__ = ["VerifierProcesses"]

_ROOT = Path(__file__).parents[2]
START_S = 180.0
"""Seconds that a process may take to import what it needs."""


class _Process:
    """One process that answers JSON lines."""

    def __init__(self, module: str, limit_s: float) -> None:
        # -P: the working directory of a job is no place for modules.
        command = [sys.executable, "-P", "-m", module, str(int(limit_s) + 5)]
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._rest = b""
        try:
            self._answer(START_S)
        except (TimeoutError, EOFError) as error:
            raise MissingDependency(
                explain(
                    "starting a verifier",
                    on=module,
                    expected="a process that can import what it needs",
                    found=self.stop() or str(error),
                    do="pip install 'trajectory-ledger[rollout]'",
                )
            ) from error

    def ask(self, request: Mapping[str, str], limit_s: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError where the process ended."""
        if self._process.stdin is None:
            raise EOFError
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError(str(error)) from error
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        out, end = self._process.stdout, time.monotonic() + limit_s
        if out is None:
            raise EOFError
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"no answer within {limit_s:g} s")
                read = os.read(out.fileno(), 1 << 16)
                if not read:
                    raise EOFError("the process ended")
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> str:
        """End the process; the last line that it wrote as an error."""
        self._process.kill()
        said = b"" if self._process.stderr is None else self._process.stderr.read()
        self._end()
        return said.decode(errors="replace").strip().rpartition("\n")[2]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class VerifierProcesses:
    """Up to `count` processes of one module, started when they are needed; any thread may ask."""

    def __init__(self, module: str, *, limit_s: float, count: int) -> None:
        """`module` is run with `python -m`; a request may take `limit_s` seconds."""
        self._module, self._limit_s = module, limit_s
        self._free = BoundedSemaphore(count)
        self._idle: LifoQueue[_Process] = LifoQueue()

    def ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            RewardFailed: none came in time, or the process died. It is ended, and the next request
                gets another one.
            MissingDependency: the process cannot be started.
        """
        with self._free:
            try:
                process = self._idle.get_nowait()
            except Empty:
                process = _Process(self._module, self._limit_s)
            try:
                found = process.ask(request, self._limit_s)
            except (TimeoutError, EOFError) as error:
                process.stop()
                raise RewardFailed(
                    explain(
                        "verifying an answer",
                        on=self._module,
                        expected=f"an answer within {self._limit_s:g} s",
                        found=str(error),
                        do="the sample counts as failed; --rm-timeout gives more time",
                    )
                ) from error
            except BaseException:
                process.stop()  # what it would answer is not asked for any more
                raise
            self._idle.put(process)
            return found

    def close(self) -> None:
        """End the processes that wait for a request."""
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().stop()
