"""A ledger, an engine whose clock stands still, and coordinators: nothing here takes real time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from ledger import open_ledger
from ledger.fields import Event
from rollout.buffer import DataBuffer
from rollout.buffer_reading import read_buffer
from rollout.coordinator import Coordinator
from rollout.engines.scripted_async import ManualClock, ScriptedAsyncEngine, length_script
from rollout.episode import EpisodeFunction, single_turn
from rollout.protocol import GenerationRequest
from rollout.rewards import Reward, ScoredSample
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.tasks import create_source
from tests.rollout.publishing import published

PROMPT_TOKENS = 4


class ByIndex:
    """Rewards that differ inside every group of two or more."""

    name, version = "by-index", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        return Reward(value=float(sample.index % 2))


class Tokens:
    """Ids are what they are: no text is needed here."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] if text == "\n" else [1 + ord(c) % 60 for c in text[-PROMPT_TOKENS:]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids)

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, Any]:
        return {"input_ids": [[int(i) for i in text.split()] for text in texts]}


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


_INLINE = Inline()


class Killed(Exception):
    """The process died here."""


class Mortal:
    """The writer of a process that can die: from then on nothing of it is stored."""

    def __init__(self, writer: Any) -> None:
        self.appends = 0
        self.die_at: int | None = None
        """Number of the append, from 0, at which it dies; None: it does not."""
        self.after = False
        """Whether that append is stored."""
        self.is_dead = False
        self._writer = writer

    def append(self, events: Sequence[Event]) -> Any:
        if self.is_dead:
            raise Killed
        number, self.appends = self.appends, self.appends + 1
        self.is_dead = number == self.die_at
        if self.is_dead and not self.after:
            raise Killed
        receipt = self._writer.append(events)
        if self.is_dead:
            raise Killed
        return receipt


def settings(**changes: Any) -> RolloutSettings:
    return RolloutSettings(
        **{
            "run_seed": 11,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 64,
            **changes,
        }
    )


class Bench:
    """A run in memory, and coordinators of it, one after the other."""

    def __init__(self, lengths: Callable[[int], int], *, uri: Any = None) -> None:
        """`lengths`: response tokens by sample, whatever happens to it."""
        self.ledger = open_ledger(uri or f"memory://{secrets.token_hex(6)}", create=True)
        if not self.ledger.runs():
            self.ledger.create_run("run")
            with self.ledger.writer("run", producer="trainer") as writer:
                writer.append([published(version) for version in range(20)])
        self.clock = ManualClock()
        self.lengths = lengths
        self.source = create_source("addition", seed=3)
        self.engine = self.new_engine()

    def new_engine(self, **options: Any) -> ScriptedAsyncEngine:
        def left(request: GenerationRequest) -> int:
            return self.lengths(request.index) - (len(request.tokens) - PROMPT_TOKENS)

        return ScriptedAsyncEngine(
            length_script(left),
            clock=self.clock,
            **{"weights": {"w": np.zeros(1, np.float32)}, "weight_version": 0, **options},
        )

    def writer(self, branch: str = "main") -> Any:
        return self.ledger.writer("run", branch, producer=f"ledger-rollout/{branch}")

    def coordinator(
        self,
        shape: RolloutShape | None = None,
        *,
        writer: Any = None,
        reward: Any = None,
        drive: EpisodeFunction = single_turn,
        branch: str = "main",
        source: Any = None,
        executor: Executor | None = _INLINE,
        **changes: Any,
    ) -> Coordinator:
        made = Coordinator(
            self.ledger,
            "run",
            branch,
            writer or self.writer(branch),
            self.engine,
            source or self.source,
            reward or ByIndex(),
            Tokens(),
            settings(**changes),
            shape or RolloutShape(),
            drive=drive,
            executor=executor,
        )
        made._events._pace = _at_once  # type: ignore[method-assign]
        return made

    async def run(self, work: Any) -> Any:
        """Move the clock, whenever all wait for it, until `work` is done."""
        task = asyncio.ensure_future(work)
        while True:
            await settle()
            if task.done():
                return task.result()
            if not await self.clock.advance_to_next():
                raise AssertionError("everybody waits, and nothing will happen")

    async def train(self, coordinator: Coordinator, steps: range, *, train_s: float = 10) -> None:
        """Rollout steps, each followed by a training that takes time and makes a version."""
        for step in steps:
            await self.run(coordinator.rollout(step, step))
            await self.run(self.clock.sleep(train_s))
            await self.new_version(coordinator, step + 1)

    async def new_version(self, coordinator: Coordinator, version: int) -> None:
        named = [("w", np.full(1, version, np.float32))]
        await self.run(coordinator.update_weights(version, named))
        await self.run(coordinator.release(version))

    def rows(self, kind: str, branch: str = "main") -> list[dict[str, Any]]:
        return self.ledger.reader("run", branch).table(kind).to_pylist()

    def groups(self, decision: str, step: int, branch: str = "main") -> list[int]:
        return sorted(
            {
                row["group_index"]
                for row in self.rows("sample_decided", branch)
                if (row["decision"], row["rollout_step"]) == (decision, step)
            }
        )

    def buffer(self, branch: str = "main") -> DataBuffer:
        return read_buffer(self.ledger, "run", branch, self.source.name)


async def _at_once() -> None:
    """Appends wait for no real time, of which a clock that stands still knows nothing."""


async def settle() -> None:
    """Let everything that can run without waiting for the clock run."""
    for _ in range(60):
        await asyncio.sleep(0)


def contents(group: Any) -> list[tuple[int, list[int]]]:
    """The samples of a group with their responses."""
    return [
        (index, sample.trajectory.response().tolist()) for index, sample in group.samples.items()
    ]


def facts(buffer: DataBuffer) -> Any:
    """All that a buffer holds, to be compared."""
    completed = sorted(
        (group.completed, key) for key, group in buffer.groups.items() if group.completed
    )
    return (
        (buffer.row, buffer.group, buffer.index, buffer.orphans, buffer.decided, buffer.failures),
        [key for _, key in completed],
        [
            (
                (group.group_index, group.rollout_step, group.round, group.source_row),
                (group.retry_of, group.failures),
                [
                    (
                        index,
                        sample.reward,
                        sample.decision,
                        sample.trajectory.context().tolist(),
                        sample.trajectory.routing_rows,
                        [
                            (piece.start, piece.turn, len(piece.tokens))
                            for piece in sample.trajectory.pieces
                        ],
                    )
                    for index, sample in group.samples.items()
                ],
            )
            for group in buffer.groups.values()
        ],
    )
