"""What the ledger costs for each generated token: the same rollouts with it and without it."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger.fields import Event
from rollout.models.tokenizer import character_tokenizer
from rollout.shapes import RolloutShape
from tests.bench.figures import Figure
from tests.bench.idle import SHAPES, Load, coordinator_of, drive, new_run
from tests.bench.simulated import read_lengths, run_simulated

__all__ = ["token_figures"]

GROUP = "cost of a generated token"


class NoSink:
    """An `Appender` that keeps nothing."""

    async def append(self, events: Sequence[Event]) -> None:
        """Nothing is stored."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One run of the load."""

    simulated_s: float
    cpu_s: float
    """Of all threads."""
    tokens: int


def _run(
    load: Load, shape: RolloutShape, folder: Path, tokenizer: Any, *, with_ledger: bool
) -> _Run:
    counted = [0]
    with new_run(folder, load.warm + load.steps + 1) as (ledger, writer):

        async def work() -> float:
            coordinator = coordinator_of(load, ledger, writer, shape, tokenizer)
            if not with_ledger:
                coordinator.sink._sink = NoSink()
            engine: Any = coordinator.engine._engine
            answered = engine.generate

            async def generate(*given: Any) -> Any:
                result = await answered(*given)
                counted[0] += len(result.tokens)
                return result

            engine.generate = generate
            timed = await drive(load, coordinator)
            return float(sum(timed.steps_s))

        gc.collect()
        began = time.process_time()
        simulated = run_simulated(work(), counts_work=True)
        return _Run(simulated, time.process_time() - began, counted[0])


def token_figures(folder: Path, lengths_file: Path | None, *, quick: bool) -> Iterator[Figure]:
    """Rollouts without training, back to back: the engine is full all the time.

    The engine is simulated: 66 tokens a second and sample, 512 samples at a time, 34,000 tokens a
    second in all, as eight GPUs make with a model of some billion parameters. Everything else is
    real, computes on this machine while the engine's clock runs, and may hold it up.
    """
    lengths = read_lengths(lengths_file)
    load = Load(
        lengths=lengths, batch=32, samples=8, running=512, train_share=0.0, update_s=0.0, warm=1,
        steps=2,
    )  # fmt: skip
    if quick:
        load = dataclasses.replace(load, batch=1, samples=4, running=4, steps=1)
    tokenizer = character_tokenizer()
    pairs: list[tuple[_Run, _Run]] = []
    shape = dataclasses.replace(SHAPES["asynchronous"], max_weight_staleness=None)
    for number in range(1 if quick else 3):
        pairs.append(
            (
                _run(load, shape, folder / f"{number}-with", tokenizer, with_ledger=True),
                _run(load, shape, folder / f"{number}-without", tokenizer, with_ledger=False),
            )
        )
    token_s = load.token_s / load.running
    cpu = statistics.median(a.cpu_s / a.tokens - b.cpu_s / b.tokens for a, b in pairs)
    loop = statistics.median(b.cpu_s / b.tokens for _, b in pairs)
    step = statistics.median(a.simulated_s / b.simulated_s - 1 for a, b in pairs)
    details = {
        "ledger_cpu_us_per_token": cpu * 1e6,
        "loop_cpu_us_per_token": loop * 1e6,
        "engine_us_per_token": token_s * 1e6,
        "engine_tokens_per_s": 1 / token_s,
        "mean_tokens": float(np.mean(lengths)),
        "with_s": statistics.median(a.simulated_s for a, _ in pairs),
        "without_s": statistics.median(b.simulated_s for _, b in pairs),
        "tokens": float(pairs[0][0].tokens),
    }
    yield Figure(
        group=GROUP,
        name="time of a rollout step",
        against="the same coordinator, nothing stored",
        ratio=step,
        goal=0.01,
        at_most=True,
        unit="%",
        note=f"{details['with_s']:.1f} s against {details['without_s']:.1f}, simulated engine of "
        f"{1 / token_s:,.0f} tokens a second; samples of {np.mean(lengths):,.0f} tokens",
        details=details,
    )
    yield Figure(
        group=GROUP,
        name="of one CPU core",
        against="the engine's time for a token",
        ratio=cpu / token_s,
        unit="%",
        note=f"{cpu * 1e9:.0f} ns of CPU a token, in all threads (the loop without it: "
        f"{loop * 1e9:.0f} ns); the engine makes one in {token_s * 1e6:.1f} µs, during which other "
        "threads compute: an append costs the same for a long sample as for a short one",
        details=details,
    )
