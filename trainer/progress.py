"""What a long training shows: a line a step, and a bar with the time left where a terminal is."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["StepProgress"]


class StepProgress:
    """Shows rollout steps as they end, on standard error. A context manager.

    `enabled=False` shows nothing (for `--json` and tests).
    """

    def __init__(self, *, total: int, enabled: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not enabled, soft_wrap=True)
        self._total = total
        self._began = self._last = time.monotonic()
        self._taken = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (enabled and sys.stderr.isatty()),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False)

    def doing(self, text: str) -> None:
        """Name what is going on now, beside the bar."""
        self._bar.update(self._task, description=text)

    def step(self, step: int, version: int, tokens: int, shown: Mapping[str, float]) -> None:
        """One optimizer step is committed. `tokens` were trained or sampled in it."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._taken += 1
        left = (self._total - self._taken) * (now - self._began) / self._taken
        values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self.say(
            f"step {step:>4} → version {version:<4} {values}  "
            f"{tokens / max(seconds, 1e-9):,.0f} tokens/s  "
            f"left {int(left) // 60}:{int(left) % 60:02d}"
        )
        self._bar.update(self._task, advance=1)
