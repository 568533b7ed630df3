"""Rollout steps: what is kept and dropped, and that a killed one ends as an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument
from ledger.events import BranchForked
from ledger.fields import Event
from ledger.seeds import sample_seed
from rollout.engines.scripted import Script, ScriptedEngine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.filters import DynamicFilterOutput
from rollout.protocol import Engine, GenerationRequest, SamplingParams
from rollout.rewards import Reward, ScoredSample, create_reward
from rollout.sampling import uniforms
from rollout.settings import RolloutSettings
from rollout.tasks import create_source
from rollout.worker import RolloutProgress, RolloutSummary, RolloutWorker
from tests.rollout.publishing import published

SETTINGS = RolloutSettings(
    run_seed=11,
    rollout_batch_size=4,
    n_samples_per_prompt=3,
    over_sampling_batch_size=3,
    rollout_max_response_len=4,
)


def sums(tokenizer: Any) -> Script:
    """Answers sums: always wrongly where X ≤ 3, always rightly where X ≥ 8, else by the seed."""

    def script(request: GenerationRequest, params: SamplingParams) -> tuple[Any, Any]:
        x, y = tokenizer.decode(request.tokens.tolist()).split("\n")[-1].strip("=").split("+")
        chance = 0.0 if int(x) <= 3 else 1.0 if int(x) >= 8 else 0.5
        right = uniforms(np.array([request.seed]), np.array([0]))[0] < chance
        text = f"{int(x) + int(y) + (not right)}\n"
        tokens = np.array(tokenizer.encode(text), np.int32)
        log_probs = -uniforms(np.full(len(tokens), request.seed), np.arange(len(tokens)))
        return tokens, log_probs.astype(np.float32)

    return script


class Killed(BaseException):
    """The process dies here."""


class DyingWriter:
    """Dies before or after the append number `at`."""

    def __init__(self, writer: Any, at: int, when: str) -> None:
        self._writer, self._left, self._when = writer, at, when

    def append(self, events: Sequence[Event]) -> Any:
        self._left -= 1
        if self._left < 0 and self._when == "before":
            raise Killed
        receipt = self._writer.append(events)
        if self._left < 0:
            raise Killed
        return receipt


class Bench:
    """A ledger with one run, and workers on it."""

    def __init__(self, root: Path, tokenizer: Any) -> None:
        self.ledger = open_ledger(root, create=True)
        self.tokenizer = tokenizer
        self.ledger.create_run("run")
        with self.ledger.writer("run", producer="trainer") as writer:
            writer.append([published(0)])
        self.engine = ScriptedEngine(sums(tokenizer), weight_version=0)
        self.progress: list[RolloutProgress] = []

    def worker(
        self,
        settings: RolloutSettings = SETTINGS,
        *,
        writer: Any = None,
        branch: str = "main",
        engine: Engine | None = None,
        task: str = "addition",
        reward: str | None = None,
    ) -> RolloutWorker:
        source = create_source(task, seed=3)
        return RolloutWorker(
            self.ledger,
            "run",
            branch,
            writer or self.ledger.writer("run", branch, producer=f"rollout-{branch}"),
            engine or self.engine,
            source,
            create_reward(reward or source.reward, args=settings),
            self.tokenizer,
            settings,
            progress=self.progress.append,
        )

    def table(self, kind: str, branch: str = "main") -> pa.Table:
        return self.ledger.reader("run", branch).table(kind)

    def digest(self, branch: str = "main") -> bytes:
        return self.ledger.content_digest("run", branch)


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Any) -> Bench:
    return Bench(tmp_path / "ledger", tokenizer)


def equal(one: RolloutSummary, other: RolloutSummary) -> bool:
    return (
        one.kept_indices.tolist() == other.kept_indices.tolist()
        and one.raw_rewards.tobytes() == other.raw_rewards.tobytes()
        and (one.mean_reward, one.tokens, one.counts)
        == (other.mean_reward, other.tokens, other.counts)
    )


def test_a_step_keeps_groups_with_mixed_rewards_and_says_why_others_go(bench: Bench) -> None:
    summary = bench.worker(replace(SETTINGS, run_seed=21)).rollout(0)
    assert len(summary.kept_indices) == 4 * 3
    decided = bench.table("sample_decided").to_pylist()
    scored = {r["index"]: r["raw_reward"] for r in bench.table("sample_scored").to_pylist()}
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in decided:
        groups.setdefault(row["group_index"], []).append(row)
    assert {row["decision"] for row in decided} == {"kept", "filtered", "surplus"}
    kept = 0
    for _, rows in sorted(groups.items()):
        assert len(rows) == 3
        rewards = [scored[row["index"]] for row in rows]
        (decision,) = {row["decision"] for row in rows}
        if len(set(rewards)) == 1:
            assert decision == "filtered"
            assert rows[0]["reason"] == f"zero reward deviation: all {rewards[0]}"
            assert rows[0]["rule"] == "check_reward_nonzero_std"
        else:
            kept += 1
            assert decision == ("kept" if kept <= 4 else "surplus")
    assert kept > 4, "no surplus: choose another seed"
    assert summary.mean_reward == np.mean(list(scored.values()))
    assert sum(summary.counts.values()) == len(decided) == len(summary.indices)
    assert summary.tokens == sum(len(t) for t in bench.table("segment_generated")["tokens"])


def test_rounds_ask_for_more_prompts_and_the_cursor_moves_on(bench: Bench) -> None:
    worker = bench.worker()
    worker.rollout(0)
    worker.rollout(1)
    issued = bench.table("prompt_issued").to_pylist()
    for step in (0, 1):
        sizes = [row["round"] for row in issued if row["rollout_step"] == step]
        assert sizes[:4] == [0] * 4
        assert sizes[4:7] == [1] * 3
    assert [row["source_row"] for row in issued] == list(range(len(issued)))
    assert [row["group_index"] for row in issued] == list(range(len(issued)))
    indices = np.concatenate([row["indices"] for row in issued])
    assert indices.tolist() == list(range(len(issued) * 3))
    assert {p.stage for p in bench.progress} == {"issued", "generated", "decided"}
    assert bench.progress[-1].kept_groups == 4


def test_every_segment_has_its_own_seed_and_version(bench: Bench) -> None:
    bench.worker().rollout(0)
    for row in bench.table("segment_generated").to_pylist():
        assert row["span_versions"] == [0]
        assert row["sampling_seed"] == sample_seed(11, 0, row["group_index"], row["index"], 0)
        assert row["stop_token_ids"] == bench.tokenizer.encode("\n")
        assert row["retokenization_drift"] == 0


def test_a_finished_step_is_read_without_the_engine(bench: Bench) -> None:
    first = bench.worker().rollout(0)
    digest, calls = bench.digest(), bench.engine.calls
    again = bench.worker().rollout(0)
    assert equal(first, again)
    assert first.generation_time_s == again.generation_time_s
    assert (bench.digest(), bench.engine.calls) == (digest, calls)


def test_killed_at_any_append_it_ends_as_if_uninterrupted(tmp_path: Path, tokenizer: Any) -> None:
    whole = Bench(tmp_path / "whole", tokenizer)
    expected = [whole.worker().rollout(step) for step in (0, 1)]
    appends = 3 * whole.engine.calls
    # Every stage of a round is met both ways.
    assert appends >= 12
    for at in range(appends):
        when = "before" if at % 2 else "after"
        bench = Bench(tmp_path / f"{at}", tokenizer)
        dying = DyingWriter(bench.ledger.writer("run", producer="rollout-main"), at, when)
        worker = bench.worker(writer=dying)
        with pytest.raises(Killed):
            _ = [worker.rollout(step) for step in (0, 1)]
        resumed = bench.worker()
        found = [resumed.rollout(step) for step in (0, 1)]
        assert all(equal(a, b) for a, b in zip(expected, found, strict=True)), (at, when)
        assert bench.digest() == whole.digest(), (at, when)
        # Only a call whose answer was not stored is made again.
        lost = when == "before" and at % 3 == 1
        assert bench.engine.calls == whole.engine.calls + lost
        bench.ledger.close()


def test_too_few_groups_is_an_error_that_keeps_what_was_made(bench: Bench) -> None:
    settings = RolloutSettings(
        run_seed=11, rollout_batch_size=2, n_samples_per_prompt=1, max_rounds=2
    )
    with pytest.raises(InvalidArgument, match=r"(?s)0 of 4 groups passed.*in the ledger"):
        bench.worker(settings).rollout(0)
    digest, calls = bench.digest(), bench.engine.calls
    with pytest.raises(InvalidArgument, match="0 of 4 groups passed"):
        bench.worker(settings).rollout(0)
    assert (bench.digest(), bench.engine.calls) == (digest, calls)


def test_without_a_filter_one_round_is_enough(bench: Bench) -> None:
    settings = RolloutSettings(
        run_seed=11,
        rollout_batch_size=3,
        n_samples_per_prompt=2,
        dynamic_sampling_filter_path="none",
    )
    summary = bench.worker(settings).rollout(5)
    assert summary.counts == {"kept": 6}
    assert bench.engine.calls == 1


def longest_first(args: RolloutSettings, samples: list[ScoredSample]) -> DynamicFilterOutput:
    keep = samples[0].group_index % 2 == 0
    assert args.n_samples_per_prompt == len(samples)
    return DynamicFilterOutput(keep=keep, reason=None if keep else "odd group")


async def slime_reward(args: RolloutSettings, sample: ScoredSample) -> float:
    return sample.response_length / args.rollout_max_response_len


def test_filters_and_rewards_by_import_path(bench: Bench) -> None:
    settings = RolloutSettings(
        run_seed=11,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        dynamic_sampling_filter_path="tests.rollout.test_worker:longest_first",
        rollout_max_response_len=8,
    )
    worker = bench.worker(settings, reward="tests.rollout.test_worker.slime_reward")
    assert worker.rollout(0).counts == {"filtered": 4, "kept": 4}
    scored = bench.table("sample_scored").to_pylist()
    assert {row["raw_reward"] for row in scored} <= {2 / 8, 3 / 8}
    assert {row["verifier"] for row in scored} == {"tests.rollout.test_worker.slime_reward"}
    assert {row["reason"] for row in bench.table("sample_decided").to_pylist()} == {"", "odd group"}


def test_a_reward_that_fails_loses_no_generation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = bench.worker()
    good = worker._reward
    worker._reward = create_reward("tests.rollout.test_worker.broken_reward")
    with pytest.raises(InvalidArgument, match="finite number"):
        worker.rollout(0)
    assert bench.table("segment_generated").num_rows == 12
    worker._reward = good
    worker.rollout(0)
    assert bench.table("segment_generated")["rollout_step"].to_pylist().count(0) % 3 == 0


def broken_reward(sample: ScoredSample) -> float:
    return float("nan")


def test_scores_that_are_stored_are_not_asked_for_again(bench: Bench) -> None:
    seen: list[int] = []

    class Counting:
        name, version = "counting", "1"

        def __call__(self, sample: ScoredSample) -> Reward:
            seen.append(sample.index)
            return Reward(value=float(sample.index % 2), parts={"odd": sample.index % 2})

    for _ in range(2):
        worker = bench.worker()
        worker._reward = Counting()
        worker.rollout(0)
    assert len(seen) == len(set(seen)) == 12
    assert bench.table("sample_scored")["part_names"].to_pylist() == [["odd"]] * 12


def test_a_branch_goes_on_from_the_cursor_and_leaves_unfinished_groups_alone(
    bench: Bench,
) -> None:
    bench.worker().rollout(0)
    rows = bench.table("prompt_issued").num_rows
    dying = DyingWriter(bench.ledger.writer("run", producer="rollout-main"), 0, "after")
    with pytest.raises(Killed):
        bench.worker(writer=dying).rollout(1)
    head = bench.ledger.branch("run", "main").head_seq
    fork = BranchForked(
        branch="other",
        parent_branch="main",
        fork_seq=head,
        weight_version=0,
        settings=json.dumps({}),
        data="fresh",
    )
    writer = bench.ledger.fork("run", fork, "rollout-other")
    before = bench.worker().rollout(0)
    assert equal(bench.worker(writer=writer, branch="other").rollout(0), before)
    bench.worker(writer=writer, branch="other").rollout(1)
    bench.worker().rollout(1)
    for branch in ("main", "other"):
        issued = bench.table("prompt_issued", branch).to_pylist()
        generated = bench.table("segment_generated", branch)["index"].to_pylist()
        assert len(generated) == len(set(generated))
        own = [r for r in issued if r["rollout_step"] == 1 and r["branch"] == branch]
        first = rows if branch == "main" else rows + 4
        assert own[0]["source_row"] == first
    everything = bench.ledger.reader("run", None).table("segment_generated")["index"].to_pylist()
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_same_seed_gives_the_same_content(
    kind: str, tmp_path: Path, tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(f"tiny_{kind}")
    settings = RolloutSettings(
        run_seed=5,
        rollout_batch_size=3,
        n_samples_per_prompt=4,
        dynamic_sampling_filter_path="none",
        rollout_max_response_len=8,
    )
    digests = []
    for name in ("one", "two"):
        bench = Bench(tmp_path / name, tokenizer)
        engine = TransformersEngine(
            folder,
            recompute_logprobs_via_prefill=True,
            micro_batch_rows=4,
            seq_length=24,
            weight_version=0,
        )
        worker = bench.worker(settings, engine=engine, task="reasoning_gym:spell_backward")
        worker.rollout(0)
        digests.append(bench.digest())
        segments = bench.table("segment_generated").to_pylist()
        prompts = {
            int(i): len(row["tokens"])
            for row in bench.table("prompt_issued").to_pylist()
            for i in row["indices"]
        }
        assert all((r["batch_rows"], r["batch_width"]) == (4, 24) for r in segments)
        routing = bench.table("routing_recorded").to_pylist()
        assert len(routing) == (12 if kind == "moe" else 0)
        lengths = {r["index"]: prompts[r["index"]] + len(r["tokens"]) for r in segments}
        for row in routing:
            assert row["rows"] == lengths[row["index"]] - 1
            assert len(row["expert_ids"]) == row["rows"] * 2 * 2
            assert (row["layers"], row["topk"], row["dtype"]) == (2, 2, "uint8")
    assert digests[0] == digests[1]
    other = Bench(tmp_path / "other", tokenizer)
    engine = TransformersEngine(folder, weight_version=0)
    changed = replace(settings, run_seed=6)
    other.worker(changed, engine=engine, task="reasoning_gym:spell_backward").rollout(0)
    assert other.digest() != digests[0]
