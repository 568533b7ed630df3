"""Runs Python code that a model wrote, in a process of its own, with limits.

What holds on Linux (x86_64, aarch64), without privileges:

- CPU seconds, wall seconds, address space, bytes of a file, open files, bytes of output;
- no new process, no signal to another one, no socket (seccomp); the process group is killed at the
  end, and with the worker;
- files: reads only of Python and of system libraries, writes only below a temporary folder that is
  removed afterwards (Landlock);
- an environment without the worker's variables, no capabilities, none to be gained.

What does not: the number of files in the folder (each is limited, their sum only by the seconds);
reads of the libraries are not private; the kernel itself is the wall, there is no virtual machine.
Where a kernel lacks a part, the result says so, and `require` makes it an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ledger.errors import InvalidArgument, explain
from rollout.tools.sandbox.kernel import CHECKS

__all__ = ["Execution", "SandboxLimits", "run_python"]

_CHILD = Path(__file__).with_name("child.py")
_OUT_OF_MEMORY, _UNCONFINED = 3, 4
_MOST_OUTPUT = 1024
"""Times what is kept of the output: who writes more is stopped."""
_PATHS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a run may use. Raises InvalidArgument where a number is not above 0."""

    wall_s: float = 10.0
    cpu_s: float = 5.0
    """Rounded up to whole seconds."""
    memory_bytes: int = 512 * 2**20
    """Of address space."""
    file_bytes: int = 16 * 2**20
    """Of one file."""
    output_bytes: int = 8192
    """Of standard output and error together that are kept: the first and the last half."""
    require: tuple[str, ...] = ()
    """Of `sandbox.kernel.CHECKS`: what must be enforced, or nothing is run."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("wall_s", "cpu_s", "memory_bytes", "file_bytes", "output_bytes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidArgument(
                    explain(
                        "checking the limits of a sandbox", on=name, expected="above 0", found=value
                    )
                )
        unknown = sorted(set(self.require) - set(CHECKS))
        if unknown:
            raise InvalidArgument(
                explain(
                    "checking the limits of a sandbox",
                    on="require",
                    expected=f"some of {', '.join(CHECKS)}",
                    found=", ".join(unknown),
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a run did."""

    output: str
    """Standard output and error as they came; where it was too much, the middle is left out, and a
    line in its place says how much."""
    output_bytes: int
    """Bytes that were written, those left out included."""
    ended: str
    """'finished', 'raised', 'wall time', 'cpu time', 'memory', 'output' (1024 times what is kept)
    or 'killed'."""
    wall_s: float
    not_enforced: Mapping[str, str] = field(default_factory=dict)
    """Of `CHECKS`: what this kernel does not enforce → why."""


async def run_python(code: str, limits: SandboxLimits) -> Execution:
    """Run `code` as a program; the value of a last expression is printed, as in a session.

    The same code gives the same output as far as it depends on neither time nor chance: hashes of
    texts are fixed. Whatever the code does is a result. When this returns, raises or is cancelled,
    nothing of the process is left.

    Raises:
        InvalidArgument: this kernel does not enforce what `limits.require` names; nothing was run.
        OSError: the process could not be started.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        heard, told = os.pipe()
        try:
            try:
                process = await _start(folder, told, limits)
            finally:
                os.close(told)
            output = _Output(limits.output_bytes)
            timed_out = False
            try:
                async with asyncio.timeout(limits.wall_s):
                    await _communicate(process, code.encode("utf-8", "replace"), output)
            except TimeoutError:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                status = await asyncio.shield(_end(process))
            report = _report(heard)
        finally:
            os.close(heard)
    not_enforced = {name: why for name, why in report.items() if why}
    if status == _UNCONFINED and any(name in not_enforced for name in limits.require):
        raise InvalidArgument(
            explain(
                "running code in a sandbox",
                on=", ".join(limits.require),
                expected="enforced by this kernel",
                found="; ".join(f"{name}: {why}" for name, why in sorted(not_enforced.items())),
                do="run on a Linux with seccomp and Landlock, or do not require it",
            )
        )
    return Execution(
        output=output.text(),
        output_bytes=output.seen,
        ended="output" if output.too_much else _ended(status, timed_out),
        wall_s=time.monotonic() - began,
        not_enforced=not_enforced,
    )


async def _start(folder: str, report: int, limits: SandboxLimits) -> asyncio.subprocess.Process:
    places = dict.fromkeys(
        str(Path(one).resolve()) for one in (sys.prefix, sys.base_prefix, *_PATHS)
    )
    told = {
        "limits": {
            "cpu_s": math.ceil(limits.cpu_s),
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
        },
        "folder": folder,
        "readable": list(places),
        "report": report,
        "require": list(limits.require),
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-s", "-P", "-B", "-X", "utf8", str(_CHILD), json.dumps(told)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(report,),
        start_new_session=True,
        cwd=folder,
        env={
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "PATH": "/usr/bin:/bin",
            # The same program prints the same again: an episode that is resumed compares.
            "PYTHONHASHSEED": "0",
            # A thread has address space of its own, which is limited.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


class _Output:
    """The first and the last half of what is written, and how much it was."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._first, self._last = bytearray(), bytearray()
        self.seen = 0
        self.too_much = False

    def add(self, data: bytes) -> None:
        self.seen += len(data)
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:][-self._half :] if room > 0 else data[-self._half :]
        del self._last[: -self._half]
        self.too_much = self.seen > 2 * self._half * _MOST_OUTPUT

    def text(self) -> str:
        cut = self.seen - len(self._first) - len(self._last)
        if not cut:
            return (self._first + self._last).decode("utf-8", "replace")
        first, last = (part.decode("utf-8", "replace") for part in (self._first, self._last))
        return f"{first}\n[output cut: {cut} of {self.seen} bytes left out]\n{last}"


async def _communicate(process: asyncio.subprocess.Process, code: bytes, output: _Output) -> None:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the sandboxed process has no pipes")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(code)
        await process.stdin.drain()
    process.stdin.close()
    while data := await process.stdout.read(2**16):
        output.add(data)
        if output.too_much:
            return
    await process.wait()


async def _end(process: asyncio.subprocess.Process) -> int:
    """Of a process that was killed: its status, once its pipe is closed too."""
    if process.stdout is not None:
        with contextlib.suppress(TimeoutError):
            # Where processes are not denied, one that left the group holds the pipe open.
            async with asyncio.timeout(1):
                while await process.stdout.read(2**16):
                    pass
    return await process.wait()


def _report(heard: int) -> dict[str, str]:
    """What the process said it enforces; nothing where it did not come so far."""
    os.set_blocking(heard, False)
    try:
        data = os.read(heard, 2**16)
    except BlockingIOError:
        data = b""
    if not data:
        return dict.fromkeys(CHECKS, "the process ended before it was confined: no code was run")
    found: dict[str, str] = json.loads(data)
    return found


def _ended(status: int, timed_out: bool) -> str:
    if timed_out:
        return "wall time"
    if status == -signal.SIGXCPU:
        return "cpu time"
    if status < 0:
        return "killed"
    return {0: "finished", _OUT_OF_MEMORY: "memory"}.get(status, "raised")
