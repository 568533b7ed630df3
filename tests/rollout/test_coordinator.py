"""The coordinator: what is kept, cut, put back and dropped, and that every prompt counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ledger import open_ledger
from rollout.protocol import GenerationRequest
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench, contents, facts


def test_a_synchronous_step_waits_for_all_and_keeps_them() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 3 + index)
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


def test_prefetched_groups_stay_in_the_buffer_when_a_process_dies() -> None:
    """Prompts 0..7, generation batch 4, rollout batch 2: [0, 1] trained, then killed: [2, 3]."""

    async def go() -> None:
        bench = Bench(lambda index: 5)
        shape = RolloutShape(partial_rollout=True)
        first = bench.coordinator(shape, over_sampling_batch_size=4)
        await bench.run(first.rollout(0, 0))
        assert bench.groups("kept", 0) == [0, 1]
        assert bench.groups("recycled", 0) == [2, 3]
        # Killed: nobody closes it. The next process takes over its producer's name.
        bench.engine = bench.new_engine()
        second = bench.coordinator(shape, over_sampling_batch_size=4)
        assert facts(second.buffer) == facts(first.buffer)
        await bench.run(second.rollout(1, 1))
        assert bench.groups("kept", 1) == [2, 3]
        assert not {request.index for request in bench.engine.requests} & set(range(8))
        await bench.run(second.rollout(2, 2))
        assert bench.groups("kept", 2) == [4, 5]
        rows = [row["source_row"] for row in bench.rows("prompt_issued")]
        assert rows == list(range(len(rows)))
        await second.close()
        bench.ledger.close()

    asyncio.run(go())


def test_partial_groups_are_there_again_with_their_tokens(tmp_path: Path) -> None:
    """Two partial groups in the buffer; close and open: both there, same index, same tokens."""

    async def go() -> None:
        bench = Bench(lambda index: 5 if index < 4 else 40, uri=tmp_path / "l")
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


def test_what_runs_on_without_partial_rollout_is_aborted() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5 if index in (0, 1, 4, 5, 6, 7) else 40)
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
