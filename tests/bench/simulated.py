"""Time that is simulated: an event loop that does not wait, lengths from a trace, a busy trainer.

The code that runs in it is the real one: coordinator, episodes, sink, ledger. Only the engine's
tokens and the trainer's step are waits, and a wait takes no time here.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollout.protocol import GenerationRequest, SamplingParams

__all__ = [
    "LoopClock",
    "SimulatedLoop",
    "Trace",
    "default_lengths",
    "read_lengths",
    "run_simulated",
    "write_lengths",
]

_T = TypeVar("_T")

MEDIAN_TOKENS, SIGMA, LONGEST_TOKENS, TRACE_SEED = 1500, 1.0, 16384, 20_26
"""The default trace: log-normal, cut at the longest; mean 2,300 tokens, 1 in 110 is cut."""


class _Selector(selectors.SelectSelector):
    """Asks its loop what to do where it would wait."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> Any:
        """As in `selectors`, but for waiting."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.loop.outside:
            return super().select(timeout if self.loop.counts_work else None)
        found = super().select(0)
        if not found:
            self.loop.skipped += timeout
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time.

    `counts_work`: what is computed, and what threads do, takes the time that it takes on this
    machine; else nothing but waiting moves the clock, and two runs are the same.
    """

    def __init__(self, *, counts_work: bool) -> None:
        """The clock begins at 0."""
        self.counts_work, self.skipped, self.outside = counts_work, 0.0, 0
        self._began = time.monotonic()
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Simulated seconds."""
        worked = time.monotonic() - self._began if self.counts_work else 0.0
        return self.skipped + worked

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """As usual; while a thread works the clock does not jump."""
        self.outside += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: Any) -> None:
        self.outside -= 1


def run_simulated(work: Coroutine[Any, Any, _T], *, counts_work: bool) -> _T:
    """Run to the end in a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(counts_work=counts_work)) as runner:
        return runner.run(work)


class LoopClock:
    """The loop's clock, for a scripted engine."""

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)


def default_lengths(count: int = 4096) -> list[int]:
    """[count] Response lengths in tokens: long-tailed, and always the same."""
    drawn = np.random.default_rng(TRACE_SEED).lognormal(np.log(MEDIAN_TOKENS), SIGMA, count)
    return [int(one) for one in np.clip(drawn, 16, LONGEST_TOKENS)]


def read_lengths(path: Path | None) -> list[int]:
    """A trace of response lengths in tokens, one a line; None: the default one."""
    if path is None:
        return default_lengths()
    lengths = [int(line) for line in path.read_text().split()]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{path}: a trace holds lengths of at least 1, one a line")
    return lengths


def write_lengths(folder: Path, given: Path | None) -> Path:
    """The file of a trace: `given`, or the default one, written to `folder`."""
    if given is not None:
        return given
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lengths.txt"
    path.write_text("".join(f"{one}\n" for one in default_lengths()))
    return path


class Trace:
    """The script of an engine that answers with lengths from a trace, by the sample's number."""

    def __init__(self, lengths: Sequence[int], *, stop: int, low: int, high: int) -> None:
        """Ids come from [low, high); `stop` ends each answer."""
        self.lengths, self._stop = lengths, stop
        random = np.random.default_rng(1)
        most = 2 * max(lengths)
        self._ids = random.integers(low, high, most).astype(np.int32)
        self._log_probs = -random.exponential(0.5, most).astype(np.float32)
        self._begun: dict[int, int] = {}

    def __call__(self, request: GenerationRequest, params: SamplingParams) -> Any:
        """What is left of the answer; an answer that was cut goes on where it was."""
        begun = self._begun.setdefault(request.index, len(request.tokens))
        whole = self.lengths[request.index % len(self.lengths)]
        at = len(request.tokens) - begun
        shift = request.index % max(1, len(self._ids) - whole)
        tokens = self._ids[shift + at : shift + whole].copy()
        tokens[-1] = self._stop
        return tokens, self._log_probs[shift + at : shift + whole]
