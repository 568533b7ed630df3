"""Commands as real processes that start at once: forks of one that has imported everything.

    python -m tests.two_commands.commands

reads a JSON object a line: `start` (module, words, file for what it prints) or `wait` (a process).
It answers each with one line. A fork is killed like any process; it ends when this one does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = ("trainer.cli", "rollout.cli")
_IMPORTED = (
    *MODULES,
    *("trainer.opening", "trainer.loop", "trainer.elsewhere", "trainer.restore"),
    *("rollout.side", "rollout.taking_turns", "rollout.engines.transformers_engine"),
    *("ledger.opening", "reasoning_gym", "transformers.models.qwen3.modeling_qwen3"),
)


@dataclass(slots=True)
class Command:
    """A command that was started."""

    pid: int
    printed: Path
    _server: Commands

    def kill(self) -> None:
        """SIGKILL, at once; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        """Its exit status; below zero where a signal ended it."""
        return int(self._server.ask({"wait": self.pid}))

    def result(self) -> dict[str, Any]:
        """Wait for a command with --json that must succeed; what it printed."""
        code = self.wait()
        said = self.printed.read_text()
        assert code == 0, said
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found


class Commands:
    """The process that forks them."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.two_commands.commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
            text=True,
        )

    def start(self, module: str, words: Sequence[str]) -> Command:
        """`python -m module words…`"""
        self._count += 1
        printed = self._folder / f"printed-{self._count}"
        pid = self.ask({"module": module, "words": list(words), "printed": str(printed)})
        return Command(int(pid), printed, self)

    def ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def commands(folder: Path, environment: dict[str, str]) -> Iterator[Commands]:
    """Start the process that forks; `folder` is for what the commands print."""
    made = Commands(folder, environment)
    try:
        yield made
    finally:
        made.close()


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: int
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _run(asked["module"], asked["words"], asked["printed"])
        print(json.dumps(answer), flush=True)


def _run(module: str, words: list[str], printed: str) -> None:
    """The fork: the command, and nothing after it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    to = os.open(printed, os.O_CREAT | os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(to, standard)
    code = 1
    try:
        code = importlib.import_module(module).main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
