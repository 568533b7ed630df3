"""What happens at the same moment: ends of steps, failures, aborts, new weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ledger.errors import Conflict, EngineFailed, RewardFailed
from ledger.fields import Event
from rollout.deciding import group_decisions
from rollout.engines.scripted_async import Failure
from rollout.episode import Episode, EpisodeAborted, GenerationCut
from rollout.gate import GatedEngine
from rollout.protocol import GenerationRequest
from rollout.rewards import Reward, ScoredSample
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench, facts, settle


def short_first(index: int) -> int:
    """Two groups of two end at once; the others take long."""
    return 5 if index < 4 else 30


class SlowDrops:
    """A writer behind which decisions on groups that come to no batch are stored half a second
    late."""

    def __init__(self, bench: Bench, sink: Any) -> None:
        self._bench, self._sink = bench, sink

    async def append(self, events: Sequence[Event]) -> None:
        if any(getattr(event, "decision", "") in ("failed", "filtered") for event in events):
            await self._bench.clock.sleep(0.5)
        await self._sink.append(events)


class NoVerdict:
    """Rewards, except of one sample."""

    name, version = "no-verdict", "1"

    def __init__(self, index: int) -> None:
        self._index = index

    def __call__(self, sample: ScoredSample) -> Reward:
        if sample.index == self._index:
            raise RewardFailed("no verdict")
        return Reward(value=float(sample.index % 2))


class SameInGroup1:
    """Rewards that differ inside every group, except for the second one."""

    name, version = "same-in-group-1", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        return Reward(value=1.0 if sample.index in (2, 3) else float(sample.index % 2))


def final(bench: Bench) -> Counter[int]:
    """How often each sample was decided for good."""
    rows = bench.rows("sample_decided")
    return Counter(row["index"] for row in rows if row["decision"] != "recycled")


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("what", ["engine", "reward", "filter"])
def test_a_group_is_dropped_while_the_step_ends(partial: bool, what: str) -> None:
    async def go() -> None:
        bench = Bench(short_first if what == "engine" else lambda index: 5 if index < 6 else 30)
        if what == "engine":
            bench.engine = bench.new_engine(
                failures=lambda request, attempt: (
                    Failure(EngineFailed("died"), 4) if request.index == 4 else None
                )
            )
        coordinator = bench.coordinator(
            RolloutShape(partial_rollout=partial),
            # Group 1 is dropped, and groups 0 and 2 are the batch; or group 2 is.
            reward={"engine": None, "reward": NoVerdict(3), "filter": SameInGroup1()}[what],
            over_sampling_batch_size=4,
        )
        coordinator.sink._sink = SlowDrops(bench, coordinator.sink._sink)
        await bench.run(coordinator.rollout(0, 0))
        if not partial:
            assert not coordinator.buffer.groups
        assert not coordinator._groups.runs, "something runs on behind the end of the step"
        await bench.run(bench.clock.sleep(100))
        await bench.run(coordinator.rollout(1, 1))
        assert set(final(bench).values()) == {1}
        retries = [row["retry_of"] for row in bench.rows("prompt_issued")]
        expected = {"engine": [2], "reward": [1], "filter": []}[what]
        assert [one for one in retries if one is not None] == expected
        # A final decision is the last one.
        decided: dict[int, list[str]] = {}
        for row in bench.rows("sample_decided"):
            decided.setdefault(row["index"], []).append(row["decision"])
        assert all(set(one[:-1]) <= {"recycled"} for one in decided.values())
        await coordinator.close()
        assert facts(bench.buffer()) == facts(coordinator.buffer)
        bench.ledger.close()

    asyncio.run(go())


@pytest.mark.parametrize("how", ["abort", "cut"])
def test_an_episode_is_stopped_before_the_engine_has_its_request(how: str) -> None:
    async def go() -> None:
        bench = Bench(lambda index: 50)
        ended: list[str] = []

        async def drive(episode: Episode) -> None:
            asking = asyncio.ensure_future(episode.generate())
            await asyncio.sleep(0)
            await (episode.abort() if how == "abort" else episode.cut())
            # The engine has not seen it when it is told to end it.
            with pytest.raises(EpisodeAborted if how == "abort" else GenerationCut):
                await asking
            ended.append(how)
            await bench.clock.sleep(1e9)

        coordinator = bench.coordinator(drive=drive, rollout_batch_size=1, n_samples_per_prompt=1)
        rollout = asyncio.ensure_future(coordinator.rollout(0, 0))
        await bench.clock.until(lambda: bool(ended))
        assert not bench.engine.requests
        rollout.cancel()
        await asyncio.wait([rollout])
        await bench.run(coordinator.close())
        bench.ledger.close()

    asyncio.run(go())


def test_requests_without_a_name_wait_at_the_gate_and_an_abort_is_not_forgotten() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 3)
        gate = GatedEngine(bench.engine)
        params = bench.coordinator().params
        await gate.update_weights(1, [("w", np.ones(1, np.float32))])
        request = GenerationRequest(index=0, tokens=np.arange(1, 5, dtype=np.int32), seed=1)
        asked = [
            asyncio.ensure_future(gate.generate(replace(request, index=i, request_id=name), params))
            for i, name in enumerate((None, None, "named"))
        ]
        await settle()
        await gate.abort(["named"])
        await gate.release(1)  # at once: the aborted one has not run since
        results = await bench.run(asyncio.gather(*asked))
        assert [len(one.tokens) for one in results] == [3, 3, 0]
        assert [request.index for request in bench.engine.requests] == [0, 1]
        bench.ledger.close()

    asyncio.run(go())


def test_failures_of_a_prompt_are_counted_through_groups_that_got_too_old() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5)
        # Prompt 0 fails, gets too old, and fails again.
        coordinator = bench.coordinator(
            RolloutShape(partial_rollout=True, max_weight_staleness=0, max_sample_retries=9),
            rollout_batch_size=1,
            n_samples_per_prompt=1,
        )
        issuer = coordinator._groups._issuer
        (first,) = issuer.take(1, rollout_step=0, round_number=0)
        await coordinator.sink.append([first])
        group = coordinator.buffer.groups[first.group_index]
        for decision in ("failed", "stale", "failed", "stale"):
            again = issuer.again(group, rollout_step=0, round_number=0)
            events = group_decisions(group, 0, decision, "for the test", "test")
            await coordinator.sink.append([*events, again])
            group = coordinator.buffer.groups[again.group_index]
            assert facts(bench.buffer()) == facts(coordinator.buffer)
        assert group.failures == 2
        bench.ledger.close()

    asyncio.run(go())


def test_nothing_is_recorded_behind_a_final_decision_that_is_on_its_way() -> None:
    async def go() -> None:
        bench = Bench(lambda index: 5)
        coordinator = bench.coordinator(rollout_batch_size=1, n_samples_per_prompt=1)
        issuer, sink = coordinator._groups._issuer, coordinator.sink
        (first,) = issuer.take(1, rollout_step=0, round_number=0)
        await sink.append([first])
        group = coordinator.buffer.groups[first.group_index]
        for decision, late in (("recycled", False), ("filtered", True)):
            events = group_decisions(group, 0, decision, "for the test", "test")
            storing = asyncio.ensure_future(sink.append(events))
            await asyncio.sleep(0)
            more = group_decisions(group, 0, "recycled", "for the test", "test")
            if late:
                with pytest.raises(Conflict, match="comes too late"):
                    await sink.append(more)
            else:
                await sink.append(more)
            await storing
        bench.ledger.close()

    asyncio.run(go())
