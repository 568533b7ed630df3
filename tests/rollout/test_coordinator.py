"""The coordinator: what is kept, cut, put back and dropped, and that every prompt counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger import open_ledger
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
from tests.rollout.test_worker import published


class ByIndex:
    """Rewards that differ inside every group of two or more."""

    name, version = "by-index", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        return Reward(value=float(sample.index % 2))


class Tokens:
    """Ids are what they are: no text is needed here."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] if text == "\n" else [1 + ord(c) % 60 for c in text[-4:]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids)

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, Any]:
        return {"input_ids": [[int(i) for i in text.split()] for text in texts]}


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


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """A ledger with one run, a scripted engine whose clock stands still, and coordinators."""

    def __init__(self, root: Path, lengths: Callable[[int], int]) -> None:
        """`lengths`: response tokens by sample, whatever happens to it."""
        self.ledger = open_ledger(root, create=True)
        if not self.ledger.runs():
            self.ledger.create_run("run")
            with self.ledger.writer("run", producer="trainer") as writer:
                writer.append([published(version) for version in range(20)])
        self.clock = ManualClock()
        self.lengths = lengths
        self.coordinators: list[Coordinator] = []
        self.source = create_source("addition", seed=3)
        self.engine = self.new_engine()

    def new_engine(self, **options: Any) -> ScriptedAsyncEngine:
        def left(request: GenerationRequest) -> int:
            return self.lengths(request.index) - (len(request.tokens) - 4)

        return ScriptedAsyncEngine(
            length_script(left),
            clock=self.clock,
            **{"weights": {"w": np.zeros(1, np.float32)}, "weight_version": 0, **options},
        )

    def coordinator(
        self,
        shape: RolloutShape | None = None,
        *,
        writer: Any = None,
        reward: Any = None,
        drive: EpisodeFunction = single_turn,
        **changes: Any,
    ) -> Coordinator:
        made = Coordinator(
            self.ledger,
            "run",
            "main",
            writer or self.ledger.writer("run", producer="ledger-rollout/main"),
            self.engine,
            self.source,
            reward or ByIndex(),
            Tokens(),
            settings(**changes),
            shape or RolloutShape(),
            drive=drive,
        )
        self.coordinators.append(made)
        return made

    async def run(self, work: Any) -> Any:
        """Move the clock, whenever nobody waits for a thread, until `work` is done."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.clock.until(
                lambda: task.done() or (self.is_quiet() and self.clock.next_due() is not None)
            )
            await settle()
            if not task.done() and self.is_quiet():
                await self.clock.advance_to_next()
        return task.result()

    def is_quiet(self) -> bool:
        """Whether nothing is being stored, or scored."""
        return not any(
            (one._events._draining is not None and not one._events._draining.done())
            or any(run.is_scoring for run in one._runs.values())
            for one in self.coordinators
        )

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return self.ledger.reader("run", "main").table(kind).to_pylist()

    def groups(self, decision: str, step: int) -> list[int]:
        return sorted(
            {
                row["group_index"]
                for row in self.rows("sample_decided")
                if (row["decision"], row["rollout_step"]) == (decision, step)
            }
        )

    def buffer(self) -> DataBuffer:
        return read_buffer(self.ledger, "run", "main", self.source.name)


def test_a_synchronous_step_waits_for_all_and_keeps_them(tmp_path: Path) -> None:
    async def go() -> None:
        bench = Bench(tmp_path / "l", lambda index: 3 + index)
        coordinator = bench.coordinator()
        for step in (0, 1):
            summary = await bench.run(coordinator.rollout(step, step))
            assert summary.counts == {"kept": 4}
            assert summary.kept_indices.tolist() == list(range(4 * step, 4 * step + 4))
            assert summary.mean_reward == 0.5
        again = await bench.run(coordinator.rollout(1, 1))
        assert again.kept_indices.tolist() == summary.kept_indices.tolist()
        await coordinator.close()
        assert len(bench.engine.requests) == 8
        rows = bench.rows("sample_decided")
        assert [(r["consumer_version"], r["staleness"]) for r in rows[-4:]] == [(1, 1)] * 4
        bench.ledger.close()

    asyncio.run(go())


def test_prefetched_groups_stay_in_the_buffer_when_a_process_dies(tmp_path: Path) -> None:
    """Prompts 0..7, generation batch 4, rollout batch 2: [0, 1] trained, then killed: [2, 3]."""

    async def go() -> None:
        bench = Bench(tmp_path / "l", lambda index: 5)
        shape = RolloutShape(partial_rollout=True)
        first = bench.coordinator(shape, over_sampling_batch_size=4)
        await bench.run(first.rollout(0, 0))
        assert bench.groups("kept", 0) == [0, 1]
        assert bench.groups("recycled", 0) == [2, 3]
        # Killed: nobody closes it. The next process takes over its producer's name.
        bench.engine = bench.new_engine()
        second = bench.coordinator(shape, over_sampling_batch_size=4)
        assert same(second.buffer, first.buffer)
        await bench.run(second.rollout(1, 1))
        assert bench.groups("kept", 1) == [2, 3]
        assert bench.engine.requests == []
        await bench.run(second.rollout(2, 2))
        assert bench.groups("kept", 2) == [4, 5]
        assert [row["source_row"] for row in bench.rows("prompt_issued")] == list(range(8))
        await second.close()
        bench.ledger.close()

    asyncio.run(go())


def test_partial_groups_are_there_again_with_their_tokens(tmp_path: Path) -> None:
    """Two partial groups in the buffer; close and open: both there, same index, same tokens."""

    async def go() -> None:
        bench = Bench(tmp_path / "l", lambda index: 5 if index < 4 else 40)
        shape = RolloutShape(partial_rollout=True)
        first = bench.coordinator(shape, over_sampling_batch_size=4)
        await bench.run(first.rollout(0, 0))
        await first.close()
        before = {key: contents(group) for key, group in first.buffer.groups.items()}
        assert list(before) == [2, 3]
        assert all(len(tokens) == 5 for group in before.values() for _, tokens in group)
        bench.ledger.close()
        bench.ledger = open_ledger(tmp_path / "l")
        bench.engine = bench.new_engine(weight_version=1)
        second = bench.coordinator(shape, over_sampling_batch_size=4)
        after = {key: contents(group) for key, group in second.buffer.groups.items()}
        assert after == before
        summary = await bench.run(second.rollout(1, 1))
        assert summary.counts == {"kept": 4, "recycled": 4}
        assert bench.groups("kept", 1) == [2, 3]
        # Resumed under the new weights: same turn, same seed, next segment, older tokens kept.
        segments = [row for row in bench.rows("segment_generated") if row["group_index"] == 2]
        assert [(r["index"], r["segment"], r["turn"], r["start"]) for r in segments] == [
            (4, 0, 0, 0),
            (5, 0, 0, 0),
            (4, 1, 0, 5),
            (5, 1, 0, 5),
        ]
        assert [r["finish_reason"] for r in segments] == ["abort"] * 2 + ["stop"] * 2
        assert [r["span_versions"] for r in segments] == [[0], [0], [1], [1]]
        assert len({r["sampling_seed"] for r in segments if r["index"] == 4}) == 1
        assert {r["staleness"] for r in bench.rows("sample_decided") if r["index"] == 4} == {
            None,
            1,
        }
        # As if it had never been cut: the ids are a function of seed and position.
        whole = bench.new_engine()
        request = bench.engine.requests[0]
        answer = await bench.run(
            whole.generate(
                GenerationRequest(index=4, tokens=request.tokens[:4], seed=request.seed),
                second.params,
            )
        )
        tokens = np.concatenate([r["tokens"] for r in segments if r["index"] == 4])
        assert tokens.tolist() == answer.tokens.tolist()
        await second.close()
        bench.ledger.close()

    asyncio.run(go())


def test_what_runs_on_without_partial_rollout_is_aborted(tmp_path: Path) -> None:
    async def go() -> None:
        bench = Bench(tmp_path / "l", lambda index: 5 if index in (0, 1, 4, 5, 6, 7) else 40)
        coordinator = bench.coordinator(over_sampling_batch_size=4)
        summary = await bench.run(coordinator.rollout(0, 0))
        assert bench.groups("kept", 0) == [0, 2]
        assert summary.counts == {"aborted": 2, "kept": 4, "surplus": 2}
        assert coordinator.buffer.groups == {}
        aborted = [r for r in bench.rows("segment_generated") if r["group_index"] == 1]
        assert [(len(r["tokens"]), r["finish_reason"]) for r in aborted] == [(5, "abort")] * 2
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())


def contents(group: Any) -> list[tuple[int, list[int]]]:
    return [
        (index, sample.trajectory.response().tolist()) for index, sample in group.samples.items()
    ]


def same(one: DataBuffer, other: DataBuffer) -> bool:
    """Whether two buffers hold the same, however they came to it."""
    return facts(one) == facts(other)


def facts(buffer: DataBuffer) -> Any:
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
