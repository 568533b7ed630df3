"""A verifier that gives no reward makes a failed sample: no score, no statistics, never a zero."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import RewardFailed
from rollout.rewards import Reward, ScoredSample
from rollout.settings import RolloutSettings
from tests.rollout.coordinating import Bench as Coordinators
from tests.rollout.test_worker import Bench as Workers

SMALL = RolloutSettings(
    run_seed=5,
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    dynamic_sampling_filter_path="none",
    max_rounds=4,
)


def cannot_judge_one(sample: ScoredSample) -> float:
    if sample.index == 1:
        raise ZeroDivisionError("no verdict")
    return float(sample.index)


def cannot_judge_any(sample: ScoredSample) -> float:
    raise ZeroDivisionError("no verdict")


def test_a_group_with_a_sample_without_reward_is_replaced(tmp_path: Path, tokenizer: Any) -> None:
    bench = Workers(tmp_path / "l", tokenizer)
    summary = bench.worker(SMALL, reward=f"{__name__}:cannot_judge_one").rollout(0)
    assert summary.counts == {"failed": 1, "filtered": 1, "kept": 4, "surplus": 2}
    # Sample 0 has a reward though its group goes; sample 1 has none.
    assert summary.raw_rewards.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert summary.mean_reward == 27 / 7
    assert 1 not in bench.table("sample_scored")["index"].to_pylist()
    rows = {row["index"]: row for row in bench.table("sample_decided").to_pylist()}
    assert "no verdict" in rows[1]["reason"]
    assert rows[0]["reason"].startswith("a sample of its group failed")
    assert rows[1]["rule"] == f"{__name__}:cannot_judge_one"
    again = bench.worker(SMALL, reward=f"{__name__}:cannot_judge_one").rollout(0)
    assert again.counts == summary.counts


def test_where_nothing_can_be_judged_the_rollout_stops(tmp_path: Path, tokenizer: Any) -> None:
    bench = Workers(tmp_path / "l", tokenizer)
    with pytest.raises(RewardFailed, match="no verdict"):
        bench.worker(SMALL, reward=f"{__name__}:cannot_judge_any").rollout(0)
    assert set(bench.table("sample_decided")["decision"].to_pylist()) == {"failed"}


class Shy:
    """Gives no reward to sample 1, the first time."""

    name, version = "shy", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        if sample.index == 1:
            raise RewardFailed("too late")
        return Reward(value=float(sample.index % 2))


def test_the_coordinator_issues_the_prompt_again() -> None:
    async def go() -> None:
        bench = Coordinators(lambda index: 3)
        coordinator = bench.coordinator(reward=Shy())
        summary = await bench.run(coordinator.rollout(0, 0))
        assert summary.counts == {"failed": 2, "kept": 4}
        failed = [r for r in bench.rows("sample_decided") if r["decision"] == "failed"]
        assert {row["index"] for row in failed} == {0, 1}
        assert "too late" in failed[1]["reason"]
        assert not {0, 1} & {row["index"] for row in bench.rows("sample_scored")}
        again = [
            r for r in bench.rows("prompt_issued") if r["retry_of"] == failed[0]["group_index"]
        ]
        assert [row["source_row"] for row in again] == [0]
        await coordinator.close()
        bench.ledger.close()

    asyncio.run(go())
