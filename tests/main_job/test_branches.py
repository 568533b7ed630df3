"""Re-training from any version: exact restoring, forks, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ledger import open_ledger
from ledger.errors import AlreadyExists, InvalidArgument, NotFound
from ledger.seeds import derive_seed
from replay.verify import verify_branch
from tests.main_job.job import retrain, train
from trainer.history import read_history
from trainer.parallel import initialize
from trainer.restore import restore
from trainer.settings import OptimizerSettings, ParallelSettings

Run = tuple[Path, dict[str, Any]]
OPTIMIZER = OptimizerSettings(lr=1e-3)


def _state_bits(ledger_dir: Path, version: int) -> tuple[str, str, str]:
    """Digests of weights, optimizer and random state of a version that was restored."""
    initialize(ParallelSettings(), seed=42, num_threads=1, deterministic=True)
    with open_ledger(ledger_dir) as ledger:
        history = read_history(ledger, "run")
        state = restore(
            ledger,
            history,
            version,
            parallel=ParallelSettings(),
            optimizer=OPTIMIZER,
            seed=42,
        )
        made_by = history.steps.get(version)
        recorded = history.weights[version]
        assert {r.name: r.checksum for r in state.tensor_records()} == dict(
            zip(recorded.tensor_names, recorded.tensor_checksums, strict=True)
        )
        if made_by is not None:
            assert state.optimizer_digest() == made_by.optimizer_digest
            assert state.random_state_digest() == made_by.random_state_digest
        return (
            recorded.root.hex(),
            state.optimizer_digest().hex(),
            state.random_state_digest().hex(),
        )


def test_every_version_is_restored_exactly_from_checkpoint_and_steps(dense_run: Run) -> None:
    ledger, _ = dense_run
    with open_ledger(ledger) as opened:
        saved = set(read_history(opened, "run").checkpoints)
    assert saved == {0, 2, 4}
    bits = [_state_bits(ledger, version) for version in range(5)]
    assert len({b[0] for b in bits}) == 5
    # The first version has no moments yet, and each later one has its own.
    assert len({b[1] for b in bits}) == 5


def test_a_branch_with_another_estimator_trains_on_the_recorded_samples(copied: Run) -> None:
    ledger, before = copied
    result = retrain(ledger, 1, advantage_estimator="rloo")
    assert result["branch"] == "v1-rloo"
    assert result["steps"] == 3
    assert result["weight_version"] == 1_000_004
    with open_ledger(ledger) as opened:
        everything = opened.reader("run", branch=None)
        steps = everything.sql(
            "select branch, step, weight_version_in as v, indices, "
            "settings::json->'algorithm'->>'advantage_estimator' as estimator, "
            "settings::json->'algorithm'->'use_rollout_logprobs' as engines "
            "from step_committed order by seq"
        ).to_pylist()
        main = [s for s in steps if s["branch"] == "main"]
        branch = [s for s in steps if s["branch"] == "v1-rloo"]
        assert [s["indices"] for s in branch] == [s["indices"] for s in main[1:]]
        assert [s["v"] for s in branch] == [1, 1_000_002, 1_000_003]
        assert {s["estimator"] for s in branch} == {"rloo"}
        # What other weights sampled is trained against what they said of it.
        assert {str(s["engines"]) for s in branch} == {"true"}
        # The branch that was there stays as it was.
        assert opened.content_digest("run", "main").hex() == before["content_digest"]
        tree = {v.weight_version: v.parent_version for v in opened.versions("run")}
        assert tree == {
            0: None,
            1: 0,
            2: 1,
            3: 2,
            4: 3,
            1_000_002: 1,
            1_000_003: 1_000_002,
            1_000_004: 1_000_003,
        }


def test_the_same_settings_on_the_recorded_samples_give_the_first_step_again(copied: Run) -> None:
    """Forked with the parent's own settings, a branch makes the parent's weights, bit for bit."""
    ledger, _ = copied
    retrain(ledger, 2, use_rollout_logprobs=False, branch="again")
    with open_ledger(ledger) as opened:
        roots = {v.weight_version: v.root for v in opened.versions("run")}
    assert roots[1_000_003] == roots[3]
    assert roots[1_000_004] == roots[4]


def test_fresh_rollouts_other_optimizer_and_a_fork_of_a_fork(copied: Run) -> None:
    ledger, _ = copied
    first = retrain(ledger, 2, data="fresh", lr=2e-3, num_rollout=4, branch="fresh")
    assert first["steps"] == 2
    with open_ledger(ledger) as opened:
        reader = opened.reader("run", "fresh")
        rows = reader.sql(
            "select branch, min(index) as low, max(index) as high, count(*) as n "
            "from segment_generated group by branch order by low"
        ).to_pylist()
        rates = reader.sql("select step, learning_rate as lr from step_committed order by step")
        versions = reader.sql(
            "select distinct unnest(span_versions) as v from segment_generated where branch = "
            "'fresh' order by v"
        )["v"].to_pylist()
    assert [r["branch"] for r in rows] == ["main", "fresh"]
    assert rows[0]["high"] < rows[1]["low"], "samples have numbers of their own"
    assert rates["lr"].to_pylist() == [1e-3, 1e-3, 2e-3, 2e-3]
    assert versions == [2, 1_000_003], "sampled by the branch's own weights"
    second = retrain(ledger, 1_000_003, advantage_estimator="mean_baseline")
    assert second["branch"] == "v1000003-mean-baseline"
    assert second["steps"] == 1
    initialize(ParallelSettings(), seed=42, num_threads=1, deterministic=True)
    with open_ledger(ledger) as opened:
        report = verify_branch(
            opened, "run", second["branch"], parallel=ParallelSettings(), seed=42
        )
    assert report.reproduced, report.verdicts
    assert report.steps == 4


@pytest.mark.parametrize("version", [9, 5, 1_000_002])
def test_an_unknown_version_is_named_with_those_that_there_are(
    dense_run: Run, version: int
) -> None:
    with pytest.raises(NotFound) as refused:
        retrain(dense_run[0], version, advantage_estimator="rloo")
    message = str(refused.value)
    assert str(version) in message
    assert "from 0 to 4" in message


def test_a_version_of_another_run_is_named(copied: Run, tiny_dense: Path) -> None:
    ledger, _ = copied
    train(ledger, tiny_dense, run_id="short", num_rollout=1)
    with pytest.raises(NotFound) as refused:
        retrain(ledger, 3, run_id="short", advantage_estimator="rloo")
    message = str(refused.value)
    assert "version 3 is in run ['run']" in message
    with pytest.raises(NotFound, match="which run is not clear"):
        retrain(ledger, 3, advantage_estimator="rloo")


def test_a_missing_checkpoint_is_named(copied: Run) -> None:
    ledger, _ = copied
    shutil.rmtree(ledger / "checkpoints" / "run" / "v000002")
    with pytest.raises(NotFound) as refused:
        retrain(ledger, 3, advantage_estimator="rloo")
    message = str(refused.value)
    assert "version 2" in message
    assert "v000002" in message
    # Nothing of the branch was written.
    with open_ledger(ledger) as opened:
        assert [b.name for b in opened.branches("run")] == ["main"]


def test_the_head_has_no_recorded_trajectories_after_it(dense_run: Run) -> None:
    with pytest.raises(InvalidArgument, match="--data fresh"):
        retrain(dense_run[0], 4, advantage_estimator="rloo")


def test_a_branch_of_that_name_with_other_settings_is_refused(copied: Run) -> None:
    ledger, _ = copied
    retrain(ledger, 3, advantage_estimator="rloo", branch="b")
    with pytest.raises(AlreadyExists, match="lr"):
        retrain(ledger, 3, advantage_estimator="rloo", lr=5e-4, branch="b")


def test_a_ledger_that_was_moved_still_finds_its_checkpoints(copied: Run, tmp_path: Path) -> None:
    ledger, _ = copied
    moved = tmp_path / "a place with spaces" / "moved"
    moved.parent.mkdir()
    ledger.rename(moved)
    assert retrain(moved, 3, advantage_estimator="rloo")["steps"] == 1


def test_scores_that_came_later_do_not_change_the_past(copied: Run) -> None:
    """A sample is scored again after its step: replaying the step reads what the step read."""
    ledger, _ = copied
    with open_ledger(ledger) as opened:
        reader = opened.reader("run")
        from ledger.encode import table_to_events

        scores = table_to_events(reader.table("sample_scored"))
        with opened.writer("run", producer="rescoring") as writer:
            writer.append(
                [s.evolve(recorded_at=None, reward=0.25, raw_reward=0.25) for s in scores]
            )
        initialize(ParallelSettings(), seed=42, num_threads=1, deterministic=True)
        report = verify_branch(opened, "run", "main", parallel=ParallelSettings(), seed=42)
    assert report.reproduced, report.verdicts


def test_evaluations_are_bound_to_versions_and_prompts_are_the_same(
    tiny_dense: Path, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    train(ledger, tiny_dense, num_rollout=3, eval_interval=2, n_eval_prompts=5)
    retrain(ledger, 1, advantage_estimator="rloo", eval_interval=2, num_rollout=2)
    with open_ledger(ledger) as opened:
        rows = (
            opened.reader("run", branch=None)
            .sql(
                "select weight_version as v, source_rows, seed, branch from eval_scored order by v"
            )
            .to_pylist()
        )
    assert [r["v"] for r in rows] == [0, 1, 2, 3, 1_000_002]
    assert {r["branch"] for r in rows if r["v"] in (1, 1_000_002)} == {"v1-rloo"}
    assert {json.dumps(r["source_rows"]) for r in rows} == {"[0, 1, 2, 3, 4]"}
    assert {r["seed"] for r in rows} == {derive_seed("evaluation", 42)}


def test_a_fresh_fork_with_unchanged_settings_is_the_branch_it_left(copied: Run) -> None:
    """Same seeds, same prompts, same weights, whatever else the run has done meanwhile."""
    ledger, before = copied
    retrain(ledger, 1, advantage_estimator="rloo", data="fresh", branch="other")
    retrain(ledger, 2, data="fresh", branch="same", num_rollout=4)
    with open_ledger(ledger) as opened:
        roots = {v.weight_version: v.root for v in opened.versions("run")}
        assert roots[2_000_003] == roots[3]
        assert roots[2_000_004] == roots[4]
        tokens = (
            opened.reader("run", branch=None)
            .sql(
                "select branch, list(tokens order by index) as t from segment_generated "
                "where rollout_step in (2, 3) and branch <> 'other' group by branch"
            )
            .to_pylist()
        )
    assert len(tokens) == 2
    assert tokens[0]["t"] == tokens[1]["t"]
    assert before["weights_root"] == roots[4].hex()


def test_a_fork_leaves_the_rest_of_its_parent_as_it_would_have_been(
    tiny_dense: Path, tmp_path: Path
) -> None:
    train(tmp_path / "a", tiny_dense, num_rollout=2)
    retrain(tmp_path / "a", 1, data="fresh", lr=5e-4)
    forked = train(tmp_path / "a", tiny_dense, num_rollout=3)
    alone = train(tmp_path / "b", tiny_dense, num_rollout=3)
    assert forked["content_digest"] == alone["content_digest"]
    assert forked["weights_root"] == alone["weights_root"]


def test_a_fork_in_the_middle_of_a_rollout_keeps_the_old_policy(
    tiny_dense: Path, tmp_path: Path
) -> None:
    """Version 1 lies between the two steps of rollout 0: old log-probs are those of version 0."""
    ledger = tmp_path / "ledger"
    train(ledger, tiny_dense, num_steps_per_rollout=2)
    retrain(ledger, 1, use_rollout_logprobs=False, branch="middle")
    with open_ledger(ledger) as opened:
        roots = {v.weight_version: v.root for v in opened.versions("run")}
    assert roots[1_000_002] == roots[2]
    assert roots[1_000_004] == roots[4]


def test_the_old_policy_of_a_cut_rollout_is_that_of_the_branch_that_is_left(
    tiny_dense: Path, tmp_path: Path
) -> None:
    """Several branches train on the same samples, each by an old policy of its own."""
    ledger = tmp_path / "ledger"
    train(ledger, tiny_dense, num_steps_per_rollout=2)
    other = {"use_tis": True, "tis_clip": 3.0}
    retrain(ledger, 0, branch="other", lr=2e-3, **other)
    # Between the two steps of the second rollout on that branch.
    retrain(ledger, 1_000_003, branch="middle")
    retrain(ledger, 0, branch="engine", use_rollout_logprobs=True)
    with pytest.raises(NotFound, match="steps with --use-rollout-logprobs"):
        retrain(ledger, 3_000_003, branch="mixed", **other, use_rollout_logprobs=False)
    with open_ledger(ledger) as opened:
        roots = {v.weight_version: v.root for v in opened.versions("run")}
        report = verify_branch(opened, "run", "middle", parallel=ParallelSettings(), seed=42)
    assert roots[2_000_004] == roots[1_000_004] != roots[4]
    assert report.reproduced, report.verdicts[-1].detail


def test_a_fresh_fork_of_a_branch_on_recorded_data_takes_new_prompts(copied: Run) -> None:
    ledger, _ = copied
    recorded = retrain(ledger, 1, advantage_estimator="rloo")
    retrain(ledger, recorded["weight_version"], data="fresh", branch="on", num_rollout=5)
    with open_ledger(ledger) as opened:
        everything = opened.reader("run", branch=None)
        trained = everything.sql(
            """
            select distinct p.source_row from
                (select unnest(indices) as index from step_committed where branch <> 'on') as t
                join (select source_row, unnest(indices) as index from prompt_issued) as p
                on p.index = t.index
            """
        )["source_row"].to_pylist()
        fresh = everything.sql("select source_row from prompt_issued where branch = 'on'")
    assert len(trained) >= 8
    assert fresh.num_rows
    assert not set(fresh["source_row"].to_pylist()) & set(trained)


def test_options_that_recorded_trajectories_cannot_follow_are_refused(dense_run: Run) -> None:
    for options in ({"task": "addition"}, {"rollout_batch_size": 1}, {"num_steps_per_rollout": 2}):
        with pytest.raises(InvalidArgument, match="--data fresh"):
            retrain(dense_run[0], 1, **options)


def test_a_lost_checkpoint_can_be_passed_over(
    copied: Run, tiny_dense: Path, tmp_path: Path
) -> None:
    ledger, _ = copied
    shutil.rmtree(ledger / "checkpoints" / "run" / "v000004")
    with pytest.raises(NotFound, match="--ignore-checkpoint 4"):
        train(ledger, num_rollout=5)
    longer = train(ledger, num_rollout=5, ignore_checkpoint=4)
    whole = train(tmp_path / "whole", tiny_dense, num_rollout=5)
    assert longer["weights_root"] == whole["weights_root"]


def test_a_second_trainer_takes_the_branch_over_and_the_first_one_stops(
    tiny_dense: Path, tmp_path: Path
) -> None:
    """The first is overtaken between two of its steps; the second ends as if it were alone."""
    from ledger.errors import FencedOff
    from ledger.writer import Writer

    ledger = tmp_path / "ledger"
    append, results = Writer.append, []

    def overtaken(writer: Writer, events: Any, **keywords: Any) -> Any:
        kinds = {type(e).KIND for e in events}
        if "step_committed" in kinds and not results:
            results.append(None)
            results.append(train(ledger, tiny_dense))
        return append(writer, events, **keywords)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Writer, "append", overtaken)
        with pytest.raises(FencedOff):
            train(ledger, tiny_dense)
    whole = train(tmp_path / "whole", tiny_dense)
    assert results[1]["content_digest"] == whole["content_digest"]
