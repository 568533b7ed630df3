"""Fully asynchronous rollouts: generation beside training, with a bound on staleness."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from ledger.encode import events_of
from ledger.errors import Conflict, EngineFailed, FencedOff, InvalidArgument
from ledger.events import SegmentGenerated
from rollout.engines.scripted_async import Failure
from rollout.episode import Episode
from rollout.rewards import Reward, ScoredSample
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench, facts


def lengths(index: int) -> int:
    """A long tail: every seventh sample takes as long as several steps."""
    return 45 if index % 7 == 3 else 3 + index % 5


def consumed(bench: Bench) -> list[dict[str, Any]]:
    return [row for row in bench.rows("sample_decided") if row["decision"] == "kept"]


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_generation_goes_on_while_the_trainer_trains(mode: str) -> None:
    async def go() -> None:
        bench = Bench(lengths)
        bench.engine = bench.new_engine(pause_mode=mode)
        coordinator = bench.coordinator(
            RolloutShape(
                fully_async=True, max_weight_staleness=2, async_data_buffer_capacity_factor=4.0
            )
        )
        await bench.train(coordinator, range(6))
        kept = consumed(bench)
        assert len(kept) == 6 * 4
        assert len({row["index"] for row in kept}) == len(kept)
        assert Counter(row["rollout_step"] for row in kept) == dict.fromkeys(range(6), 4)
        assert {row["consumer_version"] for row in kept} == set(range(6))
        assert max(row["staleness"] for row in kept) == 2
        # What says so follows from the spans.
        oldest: dict[int, int] = {}
        for row in bench.rows("segment_generated"):
            for version in row["span_versions"]:
                oldest[row["index"]] = min(version, oldest.get(row["index"], version))
        for row in kept:
            assert row["staleness"] == row["consumer_version"] - oldest[row["index"]]
        # Some were on their way when the engine took new weights.
        segments = bench.rows("segment_generated")
        assert any(row["finish_reason"] == "abort" for row in segments) == (mode == "abort")
        assert any(len(row["span_versions"]) > 1 for row in segments) == (mode == "in_place")
        await coordinator.close()
        assert facts(bench.buffer()) == facts(coordinator.buffer)
        bench.ledger.close()

    asyncio.run(go())


@pytest.mark.parametrize("handler", ["retry", "drop"])
def test_groups_that_got_too_old_are_dropped_or_tried_again(handler: str) -> None:
    async def go() -> None:
        bench = Bench(lengths)
        coordinator = bench.coordinator(
            RolloutShape(
                fully_async=True, max_weight_staleness=1, async_unused_samples_handler=handler
            )
        )
        await bench.train(coordinator, range(6))
        rows = [row for row in bench.rows("sample_decided") if row["decision"] == "stale"]
        stale = {row["group_index"]: row for row in rows}
        assert stale
        for row in stale.values():
            assert row["rule"] == "max_weight_staleness"
            of_group = [r["staleness"] for r in rows if r["group_index"] == row["group_index"]]
            assert row["reason"] == f"staleness {max(of_group)}, above 1"
            assert max(of_group) > 1
        retries = {
            row["retry_of"]: row
            for row in bench.rows("prompt_issued")
            if row["retry_of"] is not None
        }
        assert set(retries) == (set(stale) if handler == "retry" else set())
        issued = {row["group_index"]: row for row in bench.rows("prompt_issued")}
        for old, row in retries.items():
            assert row["source_row"] == issued[old]["source_row"]
            assert not set(row["indices"]) & set(issued[old]["indices"])
        first = Counter(row["source_row"] for row in issued.values() if row["retry_of"] is None)
        assert set(first.values()) == {1}
        assert not {row["group_index"] for row in consumed(bench)} & set(stale)
        assert max(row["staleness"] for row in consumed(bench)) <= 1
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())


def test_what_runs_ahead_is_bounded() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 4)
        coordinator = bench.coordinator(
            RolloutShape(
                fully_async=True, max_weight_staleness=3, async_data_buffer_capacity_factor=2.0
            )
        )
        await bench.run(coordinator.rollout(0, 0))
        await bench.run(bench.clock.sleep(1000.0))
        # Two batches, whatever the bound would allow, and nothing runs any more.
        assert len(coordinator.buffer.groups) == 4
        assert bench.clock.next_due() is None
        coordinator = bench.coordinator(
            RolloutShape(
                fully_async=True,
                max_weight_staleness=1,
                async_data_buffer_capacity_factor=100.0,
                async_max_concurrent_samples=2,
            )
        )
        most = 0
        task = asyncio.ensure_future(coordinator.rollout(1, 1))
        while not task.done():
            most = max(most, len(bench.engine.running))
            await bench.run(bench.clock.sleep(0.5))
        assert most <= 2
        bench.ledger.close()

    asyncio.run(go())


def test_the_capacity_is_that_of_areal() -> None:
    shape = RolloutShape(
        fully_async=True, max_weight_staleness=4, async_data_buffer_capacity_factor=1e6
    )
    batch = 8
    for version in range(6):
        for engine in range(version + 1):
            # (max_staleness + version of the engine + 1) · batch less what was accepted before.
            accepted = version * batch
            wanted = max(0, (4 + engine + 1) * batch - accepted)
            assert (
                shape.groups_ahead(batch, consumer_version=version, engine_version=engine) == wanted
            )


def test_a_failed_sample_is_in_no_statistics() -> None:
    """HTTP 500 of one sample: the group fails as a whole, unscored; its prompt comes again."""

    async def go() -> None:
        bench = Bench(lambda index: 6)
        bench.engine = bench.new_engine(
            failures=lambda request, attempt: (
                Failure(EngineFailed("HTTP 500")) if request.index == 2 else None
            )
        )
        coordinator = bench.coordinator()
        summary = await bench.run(coordinator.rollout(0, 0))
        assert summary.counts == {"failed": 2, "kept": 4}
        failed = [row for row in bench.rows("sample_decided") if row["decision"] == "failed"]
        assert [(row["index"], row["reason"]) for row in failed] == [
            (2, "EngineFailed: HTTP 500"),
            (3, "sample 2 of its group failed: EngineFailed: HTTP 500"),
        ]
        assert not {row["index"] for row in bench.rows("sample_scored")} & {2, 3}
        issued = bench.rows("prompt_issued")
        assert [(row["source_row"], row["retry_of"]) for row in issued] == [
            (0, None),
            (1, None),
            (1, 1),
        ]
        assert summary.mean_reward == 0.5
        await coordinator.close()
        assert facts(bench.buffer()) == facts(coordinator.buffer)
        bench.ledger.close()

    asyncio.run(go())


def test_a_prompt_that_fails_again_and_again_is_given_up() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 6)
        first = bench.source.prompt(0).text
        crashes = []

        async def drive(episode: Episode) -> None:
            if episode.trajectory.text == first:
                crashes.append(episode.trajectory.index)
                raise TimeoutError("the sandbox did not answer")
            await episode.generate()

        coordinator = bench.coordinator(RolloutShape(max_sample_retries=1), drive=drive)
        await bench.run(coordinator.rollout(0, 0))
        issued = bench.rows("prompt_issued")
        assert [(row["source_row"], row["retry_of"]) for row in issued] == [
            (0, None),
            (1, None),
            (0, 0),
            (2, None),
            (3, None),
        ]
        assert bench.groups("failed", 0) == [0, 2]
        assert coordinator.buffer.failures == {0: 1, 2: 2}
        await coordinator.close()
        assert facts(bench.buffer()) == facts(coordinator.buffer)
        bench.ledger.close()

    asyncio.run(go())


def test_nothing_but_failures_is_an_error() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 6)
        bench.engine.kill()
        coordinator = bench.coordinator(RolloutShape(fully_async=True))
        with pytest.raises(EngineFailed, match="groups all failed"):
            await bench.run(coordinator.rollout(0, 0))
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())


def test_a_step_that_keeps_nothing_ends_with_an_error() -> None:
    class Same:
        name, version = "same", "1"

        def __call__(self, sample: ScoredSample) -> Reward:
            return Reward(value=1.0)

    async def go() -> None:
        bench = Bench(lambda index: 6)
        for shape in (RolloutShape(), RolloutShape(fully_async=True)):
            coordinator = bench.coordinator(shape, reward=Same(), max_rounds=2)
            with pytest.raises(InvalidArgument, match=r"[4-6] groups filtered"):
                await bench.run(coordinator.rollout(0, 0))
            before = len(bench.engine.requests)
            with pytest.raises(InvalidArgument, match=r"[4-6] groups filtered"):
                await bench.run(coordinator.rollout(0, 0))
            assert len(bench.engine.requests) == before
            await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())


def test_an_answer_without_a_version_is_kept_out_of_a_bound() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 6)
        bench.engine = bench.new_engine(weight_version=-1)
        coordinator = bench.coordinator(RolloutShape(fully_async=True))
        summary = await bench.run(coordinator.rollout(0, 0))
        assert summary.counts == {"kept": 4}
        assert {row["staleness"] for row in bench.rows("sample_decided")} == {None}
        await coordinator.close()
        bounded = bench.coordinator(
            RolloutShape(fully_async=True, max_weight_staleness=1), max_rounds=1
        )
        with pytest.raises(InvalidArgument, match="groups stale"):
            await bench.run(bounded.rollout(1, 1))
        reasons = {r["reason"] for r in bench.rows("sample_decided") if r["decision"] == "stale"}
        assert reasons == {"the engine did not say which version sampled it"}
        await bounded.close()
        bench.ledger.close()

    asyncio.run(go())


def test_a_late_answer_is_refused() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 6)
        coordinator = bench.coordinator()
        await bench.run(coordinator.rollout(0, 0))
        again = bench.coordinator()
        table = bench.ledger.reader("run", "main").table("segment_generated")
        (late, *_) = events_of(table, SegmentGenerated)
        with pytest.raises(Conflict, match="too late"):
            await again.sink.append([late])
        with pytest.raises(FencedOff):
            await bench.run(coordinator.rollout(1, 1))
        bench.ledger.close()

    asyncio.run(go())
