"""Episodes under the coordinator, in a real ledger: failures, kills, siblings in a group."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from ledger import open_ledger
from ledger.check import check_ledger
from ledger.errors import StorageFailed
from rollout.coordinator import Coordinator
from rollout.rewards import ExactLine, Reward
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.tasks import create_source
from tests.rollout.agents import STOP, answering, speaking
from tests.rollout.test_environments import Counting, function_of
from tests.rollout.test_siblings import compacting, say
from tests.rollout.test_worker import published
from trainer.algorithms.advantages import estimate
from trainer.algorithms.rewards import RewardBatch
from trainer.batch import load_batch
from trainer.selection import select_kept
from trainer.settings import AlgorithmSettings

SIZES = {"run_seed": 5, "rollout_batch_size": 1, "n_samples_per_prompt": 2}


class Cut:
    """A writer whose store is gone after some appends."""

    def __init__(self, writer, appends):
        self.writer, self.left = writer, appends

    def append(self, events):
        if self.left == 0:
            raise StorageFailed("the machine is off")
        self.left -= 1
        return self.writer.append(events)


class Run:
    """A ledger with a run, and coordinators over it, one after the other."""

    def __init__(self, folder, tokenizer):
        self.ledger = open_ledger(folder, create=True)
        self.ledger.create_run("run")
        with self.ledger.writer("run", producer="trainer") as writer:
            writer.append([published(0)])
        self.tokenizer = tokenizer

    def rollout(self, engine, drive, *, appends=None, **changes):
        """Rollout step 0; `appends`: how many are stored before the process dies."""
        settings = RolloutSettings(
            **{
                **SIZES,
                "dynamic_sampling_filter_path": "none",
                "rollout_max_response_len": 40,
                "rollout_stop_token_ids": (STOP,),
                **changes,
            }
        )

        async def main():
            with self.ledger.writer("run", producer="ledger-rollout/main") as writer:
                coordinator = Coordinator(
                    self.ledger,
                    "run",
                    "main",
                    writer if appends is None else Cut(writer, appends),
                    engine,
                    create_source("addition", seed=3, options={"shots": 0}),
                    ExactLine(),
                    self.tokenizer,
                    settings,
                    RolloutShape(),
                    drive=drive,
                )
                try:
                    return await coordinator.rollout(0, 0)
                finally:
                    await coordinator.close()

        return asyncio.run(main())

    def rows(self, kind):
        return self.ledger.reader("run", "main").table(kind).to_pylist()

    def episodes(self):
        """Of each rollout its samples as (prompt, response), in order."""
        found = self.ledger.reader("run", "main").sql(
            "SELECT t.rollout_id, t.tokens, t.prompt_length, t.complete FROM trajectories AS t"
            " ORDER BY t.rollout_id, t.index"
        )
        by_rollout = {}
        for row in found.to_pylist():
            assert row["complete"]
            cut = row["prompt_length"]
            by_rollout.setdefault(row["rollout_id"], []).append(
                (row["tokens"][:cut], row["tokens"][cut:])
            )
        return by_rollout


@pytest.fixture
def run(tmp_path, tokenizer):
    numbers = itertools.count()
    made = []

    def begin():
        made.append(Run(tmp_path / f"l{next(numbers)}", tokenizer))
        return made[-1]

    yield begin
    for one in made:
        one.ledger.close()


def rewarded(function):
    """Rewards 1 and 0 by the sample's number."""

    async def drive(episode):
        await function(episode)
        episode.reward = Reward(value=float(episode.trajectory.index % 2 == 0))

    return drive


def test_killed_anywhere_a_group_with_siblings_comes_to_the_same_end(run, tokenizer):
    drive = rewarded(compacting(tokenizer))

    def engine_of():
        return answering(
            tokenizer, lambda c: "end" if "so far3>" in c else say(c), weight_version=0
        )

    whole = run()
    whole.rollout(engine_of(), drive)
    wanted = whole.episodes()
    assert [len(samples) for samples in wanted.values()] == [2, 2]
    for kept in (3, 11):
        cut = run()
        with pytest.raises(StorageFailed):
            cut.rollout(engine_of(), drive, appends=kept)
        stored = len(cut.rows("segment_generated"))
        engine = engine_of()
        cut.rollout(engine, drive)
        assert cut.episodes() == wanted, f"killed after {kept} appends"
        assert len(engine.requests) == len(whole.rows("segment_generated")) - stored
        assert len(cut.rows("sample_scored")) == 4
        assert [row["decision"] for row in cut.rows("sample_decided")] == ["kept"] * 4


def test_one_rollout_counts_once_in_the_batch_and_in_its_baseline(run, tokenizer):
    """Rewards 1, 1, 1, 0, the first three of one rollout: the mean is 0.5."""

    compact, plain = compacting(tokenizer), function_of(tokenizer, Counting)

    async def either(episode):
        await (compact if episode.trajectory.index % 2 == 0 else plain)(episode)

    made = run()
    summary = made.rollout(
        answering(tokenizer, lambda c: "end" if len(c) > 70 else say(c), weight_version=0),
        rewarded(either),
        dynamic_sampling_filter_path="check_reward_nonzero_std",
    )
    assert summary.mean_reward == 0.5
    reader = made.ledger.reader("run", "main")
    (indices,) = select_kept(reader, 0, n_rollouts=2)
    batch = load_batch(reader, indices)
    assert batch.rewards_B.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert len(np.unique(batch.rollout_id_B)) == 2
    rewards = RewardBatch(
        rewards_B=batch.rewards_B,
        group_index_B=batch.group_index_B,
        rollout_id_B=batch.rollout_id_B,
        response_lengths_B=batch.response_lengths_B,
        loss_mask_N=batch.loss_mask_N,
    )
    settings = AlgorithmSettings(advantage_estimator="mean_baseline")
    advantages_N = estimate(rewards, settings).advantages_N
    assert set(advantages_N[batch.loss_mask_N > 0].tolist()) == {0.5, -0.5}
    report = check_ledger(reader)
    assert report.ok, report.findings


def test_an_environment_that_crashes_is_a_failure_and_no_reward(run, tokenizer):
    """The group's prompt is issued again, and what failed is in no statistic."""
    crashes = iter([True])

    class Once(Counting):
        def step(self, action):
            if next(crashes, False):
                raise ConnectionError("gone")
            return super().step(action)

    made = run()
    engine = speaking(tokenizer, "abc", "end", weight_version=0)
    summary = made.rollout(engine, rewarded(function_of(tokenizer, Once)))
    first, again = made.rows("prompt_issued")
    assert again["retry_of"] == first["group_index"]
    assert again["source_row"] == first["source_row"]
    decided = {
        row["index"]: (row["decision"], row["reason"]) for row in made.rows("sample_decided")
    }
    failed = [decided[index] for index in first["indices"]]
    assert [decision for decision, _ in failed] == ["failed", "failed"]
    assert any("ConnectionError: gone" in reason for _, reason in failed)
    scored = {row["index"] for row in made.rows("sample_scored")}
    assert scored == set(again["indices"])
    assert summary.mean_reward == 0.5
