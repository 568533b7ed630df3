"""A pair of processes that form one torch.distributed world, for tests of layouts.

Starting Megatron costs seconds, so the pair is started once a session and runs one check after
another. A check is a function at the top of an importable module; it runs in both ranks at once,
after `trainer.parallel.initialize` with the layout asked for, and returns something picklable:

    # tests/trainer/ranks/checks_mine.py       (imports torch and trainer freely)
    def mean_over_ranks(value: float) -> float: ...

    # tests/trainer/test_mine.py
    pytestmark = pytest.mark.xdist_group("ranks")      # all its tests on the worker with the pair

    def test_it(ranks: Pair) -> None:
        layout = ParallelSettings(tensor_model_parallel_size=2)
        first, second = ranks.run(checks_mine.mean_over_ranks, 3.0, layout=layout)

`run` gives the result of each rank. Where a rank raises, `RankFailed` holds both ranks' tracebacks;
where one hangs past the deadline it holds the stacks of all threads. After either the pair is
killed, and the next `run` starts a new one. With `layout=None` the process groups stay as they are;
in a new pair there is no world yet.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from trainer.settings import ParallelSettings

__all__ = ["Pair", "RankFailed"]

_START_S = 120.0
"""Both ranks start, or import Megatron, on a busy machine."""
_OTHER_S = 5.0
"""What the other rank gets to tell its own story after one has failed."""


class RankFailed(AssertionError):
    """A check raised or hung; the message says what each rank was doing."""


class Pair:
    """Two ranks, started at the first `run`."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._starts = 0
        self._has_world = False

    def run(
        self,
        check: Callable[..., Any],
        *args: Any,
        layout: ParallelSettings | None = None,
        seed: int = 0,
        deadline_s: float = 60.0,
    ) -> list[Any]:
        """Call `check(*args)` in every rank; returns the results by rank.

        Raises RankFailed.
        """
        if not self._processes:
            self._start()
        task = (check.__module__, check.__qualname__, args, layout, seed)
        for connection in self._connections:
            # Not `send`: torch would hand tensors over in memory that both processes map.
            connection.send_bytes(pickle.dumps(task))
        if layout is not None and not self._has_world:
            deadline_s += _START_S
            self._has_world = True
        answers = self._collect(time.monotonic() + deadline_s)
        if all(ok for ok, _ in answers):
            return [value for _, value in answers]
        stories = "\n".join(
            f"--- rank {rank} ---\n{'was still well' if ok else value}"
            for rank, (ok, value) in enumerate(answers)
        )
        self.kill()
        raise RankFailed(f"{check.__qualname__} with {layout}\n{stories}")

    def _start(self) -> None:
        self._starts += 1
        self._has_world = False
        folder = Path(self._folder.name)
        address = str(folder / f"socket-{self._starts}")
        with Listener(address, "AF_UNIX") as listener:
            for rank in range(self.size):
                environment = dict(os.environ, OMP_NUM_THREADS="1")
                environment.pop("PYTEST_CURRENT_TEST", None)
                with self._log(rank).open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [
                                *(sys.executable, "-m", "tests.trainer.ranks.child"),
                                *(str(rank), str(self.size), address),
                                str(folder / f"store-{self._starts}"),
                            ],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=environment,
                        )
                    )
            # accept() has no deadline of its own: a child that died would be waited for for good.
            listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
            by_rank: dict[int, Connection] = {}
            try:
                for _ in range(self.size):
                    connection = listener.accept()
                    by_rank[connection.recv()] = connection
            except (OSError, EOFError) as error:
                logs = "\n".join(self._log(rank).read_text("utf-8") for rank in range(self.size))
                self.kill()
                raise RankFailed(f"the ranks did not start: {error!r}\n{logs}") from error
        self._connections = [by_rank[rank] for rank in range(self.size)]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log-{self._starts}-{rank}"

    def _collect(self, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers
            }
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    answers[rank] = (False, self._stacks(rank))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError) as error:
                    answers[rank] = (False, f"died: {error!r}\n{self._tail(rank)}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _OTHER_S)
        return [answers[rank] for rank in range(self.size)]

    def _stacks(self, rank: int) -> str:
        """What a rank that does not answer is doing, as faulthandler prints it."""
        process = self._processes[rank]
        before = self._log(rank).stat().st_size
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 2.0
        while self._log(rank).stat().st_size == before and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        return f"hung:\n{self._tail(rank)}"

    def _tail(self, rank: int) -> str:
        return self._log(rank).read_text("utf-8", errors="replace")[-6000:]

    def kill(self) -> None:
        """End both ranks now. The next `run` starts them again."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []

    def close(self) -> None:
        """End both ranks and remove what they wrote."""
        self.kill()
        self._folder.cleanup()
