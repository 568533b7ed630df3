"""SGLang servers as child processes: started, watched, and gone when this process is.

The interpreter may be another one than this process's, of an environment with sglang in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ledger.errors import EngineFailed, InvalidArgument, explain

__all__ = ["EngineProcess", "LaunchPlan", "device_shares", "free_port"]

_GUARD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(0)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs before the server, in its process: the kernel ends it when the one that started it dies.

The death signal (PR_SET_PDEATHSIG, 1) outlives exec. Schedulers that the server starts end with it:
SGLang gives them the same signal."""

_LAST_LINES = 30
_GONE_S = 2.0
"""How long killed processes may take to be gone, and their memory with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """How one engine is started; the port is chosen anew for each start."""

    model_dir: Path
    log: Path
    """Where its output is appended."""
    words: tuple[str, ...] = ()
    """Arguments of the server, beside model, host and port."""
    python: str = sys.executable
    module: str = "sglang.launch_server"
    """A module, or the path of a script (`.py`), that takes the server's arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what this process has; an empty text removes a variable."""
    devices: tuple[str, ...] | None = None
    """What CUDA_VISIBLE_DEVICES says; None: as this process has it."""
    host: str = "127.0.0.1"
    ready_timeout_s: float = 1200.0

    def command(self, port: int) -> list[str]:
        """The words of the server's command line."""
        script = self.module.endswith(".py")
        return [
            self.python,
            *([self.module] if script else ["-m", self.module]),
            "--model-path",
            str(self.model_dir),
            "--host",
            self.host,
            "--port",
            str(port),
            *self.words,
        ]

    def full_environment(self) -> dict[str, str]:
        """What the server's process gets."""
        found = {**os.environ, **self.environment}
        # Log-probabilities are of the distribution that was sampled from, temperature applied.
        found["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
        if self.devices is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return {name: value for name, value in found.items() if value != ""}


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """One server process, in a session of its own. All of one event loop.

    The event loop's thread must live as long as the server: on Linux the server dies with it.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        """Nothing is started yet."""
        self.plan = plan
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """Of the last start."""
        return f"http://{self.plan.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the server's first process; None where it does not run."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self, is_ready: Callable[[str], Awaitable[bool]]) -> str:
        """Start the server and wait until `is_ready(address)`; returns the address.

        Raises:
            EngineFailed: it could not be started, died first (the message has the last lines of its
                log), or was not ready within `ready_timeout_s`. It does not run then.
        """
        await self.stop()
        for _ in range(3):
            self.starts += 1
            self._port = free_port(self.plan.host)
            began = self._log_size()
            try:
                await self._start(is_ready)
            except EngineFailed:
                await self.stop()
                # Somebody else may have taken the port between the choice and its use.
                if "address already in use" in self._tail(began).lower():
                    continue
                raise
            except BaseException:
                await self.stop()
                raise
            return self.address
        raise self._failed("a free port, in three attempts", self._tail(began))

    async def _start(self, is_ready: Callable[[str], Awaitable[bool]]) -> None:
        plan, began = self.plan, self._log_size()
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        command = plan.command(self._port)
        with plan.log.open("ab") as log:
            log.write(f"# {' '.join(command)}\n".encode())
            log.flush()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _GUARD,
                    str(os.getpid()),
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=plan.full_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise self._failed("a process", f"{type(error).__name__}: {error}") from error
        gone = asyncio.create_task(self._process.wait())
        until = time.monotonic() + plan.ready_timeout_s
        try:
            while not await is_ready(self.address):
                if time.monotonic() > until:
                    raise self._failed(
                        f"a server that is ready within {plan.ready_timeout_s:g} s",
                        self._tail(began),
                    )
                done, _ = await asyncio.wait([gone], timeout=0.25)
                if done:
                    code = gone.result()
                    raise self._failed(
                        "a server that runs", f"it ended with {_ended(code)}\n{self._tail(began)}"
                    )
        finally:
            gone.cancel()

    def _failed(self, expected: str, found: str) -> EngineFailed:
        return EngineFailed(
            explain(
                "starting an SGLang server",
                on=f"{self.address} for {self.plan.model_dir}",
                expected=expected,
                found=found,
                do=f"read {self.plan.log}; its first line is the command",
            )
        )

    def _log_size(self) -> int:
        return self.plan.log.stat().st_size if self.plan.log.exists() else 0

    def _tail(self, began: int) -> str:
        """The last lines of the log since `began`."""
        if not self.plan.log.exists():
            return "no log"
        with self.plan.log.open("rb") as log:
            log.seek(max(began, self._log_size() - 20_000))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    | {line[:300]}" for line in lines[-_LAST_LINES:])

    async def wait(self) -> str:
        """Return when the server has ended, with how it did."""
        if self._process is None:
            return "it was not started"
        return _ended(await self._process.wait())

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """End the server and everything that it started, and wait until nothing of it runs."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        # Also where the first process is gone: its children may not be.
        _signal(process.pid, signal.SIGKILL)
        await process.wait()
        self._process = None
        until = time.monotonic() + _GONE_S
        while _runs(process.pid) and time.monotonic() < until:
            await asyncio.sleep(0.01)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _runs(group: int) -> bool:
    """Whether a process of the group has not ended. One that ended may wait for its parent's wait,
    which in a container may never come: it holds nothing any more."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    return not stats or any(_is_of(stat, group) for stat in stats)


def _is_of(stat: Path, group: int) -> bool:
    try:
        state, _, found, *_ = stat.read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False  # it has ended meanwhile
    return int(found) == group and state not in "ZX"


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def device_shares(
    visible: Sequence[str], engines: int, per_engine: int
) -> list[tuple[str, ...]] | None:
    """The last `engines × per_engine` of the visible devices, dealt out in order.

    None where none are visible: then engines compute on the CPU, or say what they lack. Raises
    InvalidArgument where there are fewer.
    """
    if not visible:
        return None
    wanted = engines * per_engine
    if len(visible) < wanted:
        raise InvalidArgument(
            explain(
                "dealing out devices to engines",
                on=f"{engines} engines of {per_engine}",
                expected=f"at least {wanted} CUDA devices",
                found=f"{len(visible)} ({', '.join(visible)})",
                do="lower --rollout-num-gpus",
            )
        )
    taken = list(visible[-wanted:])
    return [tuple(taken[i * per_engine : (i + 1) * per_engine]) for i in range(engines)]
