"""The coordinator: what is kept, cut, put back and dropped, and that every prompt counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ledger import open_ledger
from ledger.events import BranchForked
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


def test_a_branch_issues_again_what_its_parent_had_not_decided() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5 if index < 4 else 40)
        shape = RolloutShape(partial_rollout=True)
        parent = bench.coordinator(shape, over_sampling_batch_size=4)
        await bench.run(parent.rollout(0, 0))
        fork = BranchForked(
            branch="other",
            parent_branch="main",
            fork_seq=bench.ledger.branch("run", "main").head_seq,
            weight_version=0,
            settings="{}",
            data="fresh",
        )
        writer = bench.ledger.fork("run", fork, "ledger-rollout/other")
        bench.lengths = lambda index: 5
        child = bench.coordinator(shape, writer=writer, branch="other", over_sampling_batch_size=4)
        assert [(one.group_index, one.source_row) for one in child.buffer.orphans] == [
            (2, 2),
            (3, 3),
        ]
        await bench.run(child.rollout(1, 0))
        issued = [row for row in bench.rows("prompt_issued", "other") if row["branch"] == "other"]
        assert [(row["source_row"], row["retry_of"]) for row in issued] == [
            (2, 2),
            (3, 3),
            (4, None),
            (5, None),
        ]
        # The samples are its own; the first group that it numbers follows those that it saw.
        assert min(row["group_index"] for row in issued) == 10**12 + 4
        assert bench.groups("kept", 1, "other") == [10**12 + 4, 10**12 + 5]
        await child.close()
        assert facts(bench.buffer("other")) == facts(child.buffer)
        # The parent goes on with what it had.
        await bench.run(parent.rollout(1, 1))
        assert bench.groups("kept", 1) == [2, 3]
        await parent.close()
        bench.ledger.close()

    asyncio.run(go())


def test_the_greedy_sample_of_a_group_is_a_part_of_the_others_rewards() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5)
        coordinator = bench.coordinator(greedy_baseline_key="greedy_reward")
        summary = await bench.run(coordinator.rollout(0, 0))
        assert summary.counts == {"kept": 4, "surplus": 2}
        segments = {row["index"]: row for row in bench.rows("segment_generated")}
        assert [segments[index]["temperature"] for index in range(6)] == [1, 1, 0, 1, 1, 0]
        scores = {row["index"]: row for row in bench.rows("sample_scored")}
        assert scores[0]["part_names"] == ["greedy_reward"]
        assert scores[0]["part_values"] == [scores[2]["raw_reward"]] == [0.0]
        assert scores[3]["part_values"] == [scores[5]["raw_reward"]] == [1.0]
        assert scores[2]["part_names"] == []
        assert summary.kept_indices.tolist() == [0, 1, 3, 4]
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())


def test_routing_of_a_resumed_sample_is_recorded_once() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5 if index < 4 else 40)
        bench.engine = bench.new_engine(routing=(2, 2, 8))
        coordinator = bench.coordinator(
            RolloutShape(partial_rollout=True), over_sampling_batch_size=4
        )
        await bench.run(coordinator.rollout(0, 0))
        await bench.run(coordinator.rollout(1, 1))
        routing = [row for row in bench.rows("routing_recorded") if row["index"] == 4]
        # 4 tokens of the prompt and 5 that were sampled before the cut; 40 in all.
        assert [(row["segment"], row["start"], row["rows"]) for row in routing] == [
            (0, 0, 8),
            (1, 8, 35),
        ]
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())
