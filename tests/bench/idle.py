"""How long the trainer waits: synchronous, partial and asynchronous rollouts of one trace."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger import open_ledger
from rollout.coordinator import Coordinator
from rollout.engines.scripted_async import ScriptedAsyncEngine
from rollout.rewards import Reward, ScoredSample
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.tasks import create_source
from tests.bench.episodes import version
from tests.bench.figures import Figure
from tests.bench.samples import emptied
from tests.bench.simulated import LoopClock, Trace, read_lengths, run_simulated

__all__ = [
    "SHAPES",
    "Load",
    "NoText",
    "Timed",
    "coordinator_of",
    "drive",
    "idle_figures",
    "new_run",
    "run_shape",
]

GROUP = "idle trainer (simulated)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is simulated. One engine, of which a token takes the same time however many run."""

    lengths: Sequence[int]
    batch: int = 8
    """Groups of a rollout step."""
    samples: int = 8
    """Samples of a group."""
    token_s: float = 0.015
    running: int = 32
    """Samples that the engine has at a time: it makes `running / token_s` tokens a second."""
    train_share: float = 0.9
    """Training of a step, as a part of what the engine needs for the mean step at full load."""
    update_s: float = 2.0
    """A weight update; the engine stands still meanwhile."""
    warm: int = 3
    """Steps before those that count: what was generated ahead while the trainer had nothing is used
    up by then."""
    steps: int = 6

    @property
    def rollout_s(self) -> float:
        """Seconds that a full engine needs for the tokens of a mean step."""
        mean = float(np.mean(self.lengths))
        return mean * self.batch * self.samples * self.token_s / self.running

    @property
    def train_s(self) -> float:
        """Seconds of the training of a step."""
        return self.train_share * self.rollout_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of each step that counts, from its end to that of the one before."""

    steps_s: tuple[float, ...]
    rollout_s: float
    """Seconds that a full engine needs for the tokens that a step trains on; the mean."""
    train_s: float

    @property
    def step_s(self) -> float:
        """The mean."""
        return float(np.mean(self.steps_s))

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer has nothing to train on."""
        return 1 - self.train_s / self.step_s


class Alternating:
    """A reward that differs inside every group, and asks for nothing."""

    name, version = "alternating", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        """Half of them are right."""
        return Reward(value=float(sample.index % 2))


class NoText:
    """A tokenizer of which nobody reads the text."""

    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """As many ids as characters."""
        return [3] * len(text)

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Nothing."""
        return ""

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> Any:
        """Nothing, for each."""
        return {"input_ids": [[] for _ in texts]}


SHAPES = {
    "synchronous": RolloutShape(),
    "partial": RolloutShape(partial_rollout=True),
    "asynchronous": RolloutShape(fully_async=True, max_weight_staleness=4),
}


def coordinator_of(
    load: Load, ledger: Any, writer: Any, shape: RolloutShape, tokenizer: Any
) -> Coordinator:
    """The real coordinator over an engine that answers with the lengths of the trace."""
    engine = ScriptedAsyncEngine(
        Trace(load.lengths, stop=tokenizer.eos_token_id, low=3, high=40),
        clock=LoopClock(),  # type: ignore[arg-type]
        token_s=load.token_s,
        max_running=load.running,
        weight_version=0,
    )
    return Coordinator(
        ledger,
        "run",
        "main",
        writer,
        engine,
        create_source("addition", seed=1),
        Alternating(),
        tokenizer,
        RolloutSettings(
            run_seed=1,
            rollout_batch_size=load.batch,
            n_samples_per_prompt=load.samples,
            over_sampling_batch_size=load.batch * 3 // 2 if shape.partial_rollout else None,
            rollout_max_response_len=max(load.lengths) + 1,
            rollout_stop_token_ids=(tokenizer.eos_token_id,),
        ),
        shape,
    )


async def drive(load: Load, coordinator: Coordinator) -> Timed:
    """Rollouts, training and weight updates, one step after the other."""
    loop = asyncio.get_running_loop()
    ends: list[float] = []
    tokens = 0
    for step in range(load.warm + load.steps):
        summary = await coordinator.rollout(step, step)
        if step >= load.warm:
            kept = summary.kept_indices.tolist()
            tokens += sum(load.lengths[i % len(load.lengths)] for i in kept)
        await asyncio.sleep(load.train_s)
        await coordinator.update_weights(step + 1, [])
        await asyncio.sleep(load.update_s)
        await coordinator.release(step + 1)
        ends.append(loop.time())
    await coordinator.close()
    return Timed(
        steps_s=tuple(b - a for a, b in itertools.pairwise(ends[load.warm - 1 :])),
        rollout_s=tokens * load.token_s / load.running / load.steps,
        train_s=load.train_s,
    )


@contextlib.contextmanager
def new_run(folder: Path, versions: int) -> Iterator[tuple[Any, Any]]:
    """A ledger with a run whose weight versions are published, and its writer."""
    with open_ledger(emptied(folder), create=True) as ledger:
        ledger.create_run("run")
        with ledger.writer("run", producer="trainer") as trainer:
            for number in range(versions):
                trainer.append([version(number, None if number == 0 else number - 1)])
        with ledger.writer("run", producer="ledger-rollout/main") as writer:
            yield ledger, writer


def run_shape(load: Load, shape: RolloutShape, folder: Path) -> Timed:
    """Simulate the load in one shape; the ledger is real, and lies in `folder`."""
    with new_run(folder, load.warm + load.steps + 1) as (ledger, writer):

        async def work() -> Timed:
            return await drive(load, coordinator_of(load, ledger, writer, shape, NoText()))

        return run_simulated(work(), counts_work=False)


def idle_figures(folder: Path, lengths_file: Path | None, *, quick: bool) -> Iterator[Figure]:
    """The three shapes where training is nearly as long as generation; and where it is half of it.

    The lengths are those of `lengths_file`, or the default ones.
    """
    lengths = read_lengths(lengths_file)
    cases = [(name, 0.9) for name in SHAPES] + [("asynchronous", 0.5)]
    for name, share in cases:
        load = Load(lengths=lengths, train_share=share)
        if name != "asynchronous":
            load = dataclasses.replace(load, warm=1)  # nothing is generated ahead
        if quick:
            load = dataclasses.replace(load, batch=1, samples=4, running=4, warm=1, steps=1)
        timed = run_shape(load, SHAPES[name], folder / f"{name}-{share}")
        longer = max(timed.rollout_s, load.train_s)
        yield Figure(
            group=GROUP,
            name=f"{name}, training {share:.0%} of generation",
            against="max(rollout, train)",
            ratio=timed.step_s / longer,
            goal=1.1 if name == "asynchronous" else None,
            at_most=True,
            note=f"trainer idle {timed.idle:.0%}; a step {timed.step_s:.0f} s: a full engine "
            f"needs {timed.rollout_s:.0f}, training {load.train_s:.0f}, the weight update "
            f"{load.update_s:.0f}",
            details={
                "idle": timed.idle,
                "step_s": timed.step_s,
                "rollout_s": timed.rollout_s,
                "train_s": load.train_s,
                "update_s": load.update_s,
                "batch_groups": load.batch,
                "group_samples": load.samples,
                "engine_requests": load.running,
                "token_s": load.token_s,
                "mean_tokens": float(np.mean(lengths)),
                "max_tokens": max(lengths),
            },
        )
