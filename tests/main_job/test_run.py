"""A run from first prompt to last checkpoint: what is recorded, and that it is the same again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import open_ledger
from ledger.check import check_ledger
from ledger.errors import InvalidArgument, MissingDependency
from ledger.verify import verify_ledger
from tests.main_job.job import command_line, identity, train

Run = tuple[Path, dict[str, Any]]


def test_everything_is_recorded_and_checks_out(dense_run: Run) -> None:
    where, result = dense_run
    with open_ledger(where) as ledger:
        reader = ledger.reader("run")
        report = verify_ledger(ledger)
        assert report.ok, report
        invariants = check_ledger(ledger.reader("run", branch=None))
        assert invariants.ok, invariants
        kinds = set(reader.kinds())
        expected = {
            *("run_started", "prompt_issued", "segment_generated", "sample_scored"),
            *("sample_decided", "signal_recorded", "step_committed", "weights_published"),
            "checkpoint_saved",
        }
        assert kinds == expected
        steps = reader.sql("select step, weight_version_in, weight_version_out from steps")
        assert steps.to_pylist() == [
            {"step": s, "weight_version_in": s, "weight_version_out": s + 1} for s in range(4)
        ]
        sampled = reader.sql(
            "select span_versions, rollout_step from segment_generated order by index"
        ).to_pylist()
        assert all(row["span_versions"] == [row["rollout_step"]] for row in sampled)
    assert result["weight_version"] == 4


def test_every_kept_sample_is_trained_once_and_no_other(dense_run: Run) -> None:
    with open_ledger(dense_run[0]) as ledger:
        reader = ledger.reader("run")
        trained = reader.sql("select unnest(indices) as index from step_committed")["index"]
        kept = reader.sql("select index from sample_decided where decision = 'kept'")["index"]
    trained_indices = trained.to_numpy()
    assert len(np.unique(trained_indices)) == len(trained_indices) == 4 * 2 * 4
    assert sorted(trained_indices) == sorted(kept.to_numpy())


def test_rollout_and_trainer_log_probs_are_equal_bit_for_bit_when_dense(dense_run: Run) -> None:
    with open_ledger(dense_run[0]) as ledger:
        reader = ledger.reader("run")
        rows = reader.sql(
            """
            select g.rollout_log_probs as engine, s.log_probs as trainer, g.sampler_log_probs as kv
            from signal_recorded as s join segment_generated as g on g.index = s.index
            """
        )
    engine, trainer, kv = (
        rows[name].combine_chunks().flatten().to_numpy() for name in ("engine", "trainer", "kv")
    )
    assert len(engine) > 100
    assert np.array_equal(engine.view(np.uint32), trainer.view(np.uint32))
    # What the sampler saw through its cache is near, and not the same: the mode matters.
    assert 0 < np.abs(kv - trainer).max() < 1e-4


def test_experts_are_recorded_and_the_mismatch_is_a_metric(moe_run: Run) -> None:
    with open_ledger(moe_run[0]) as ledger:
        reader = ledger.reader("run")
        routing = reader.sql(
            """
            select r.rows, r.layers, r.topk, r.dtype, octet_length(r.expert_ids) as size,
                   len(p.tokens) + len(g.tokens) - 1 as fed
            from routing_recorded as r
            join segment_generated as g on g.index = r.index
            join prompt_issued as p on p.group_index = g.group_index
            """
        ).to_pylist()
        steps = reader.sql(
            "select metric_values[list_position(metric_names, 'logprob_mismatch_max')] as worst "
            "from step_committed"
        )["worst"].to_pylist()
    assert routing
    for row in routing:
        assert row["rows"] == row["fed"]
        assert row["dtype"] == "uint8"
        assert row["size"] == row["rows"] * row["layers"] * row["topk"]
    assert len(steps) == 2
    assert max(steps) < 1e-5


def test_a_second_process_gives_the_same_trajectories_digest_and_weights(
    dense_run: Run, tiny_dense: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trainer.cli"),
            *command_line(tmp_path / "again", tiny_dense, num_rollout=4),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert identity(again) == identity(dense_run[1])
    # The chain covers measurements too, and those of two processes are never the same.
    assert again["chain_head"] != dense_run[1]["chain_head"]


def test_another_seed_gives_another_run(dense_run: Run, tiny_dense: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "other", tiny_dense, num_rollout=4, rollout_seed=43)
    assert other["content_digest"] != dense_run[1]["content_digest"]
    assert other["weights_root"] != dense_run[1]["weights_root"]


def test_a_batch_that_does_not_fit_is_refused_and_nothing_is_written(
    tiny_dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        train(
            tmp_path / "ledger",
            tiny_dense,
            rollout_batch_size=16,
            n_samples_per_prompt=8,
            global_batch_size=100,
        )
    message = str(refused.value)
    assert "rollout_batch_size × n_samples_per_prompt" in message
    assert "128" in message
    assert "100" in message
    with open_ledger(tmp_path / "ledger") as ledger:
        assert ledger.runs() == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"engine": "sglang", "recompute_logprobs_via_prefill": False},
            MissingDependency,
            "pip install sglang",
        ),
        ({"engine": "sglang"}, InvalidArgument, "--recompute-logprobs-via-prefill"),
        ({"engine": "vllm"}, InvalidArgument, "transformers, sglang"),
        ({"advantage_estimator": "grp"}, InvalidArgument, "grpo"),
        ({"task": "subtraction"}, InvalidArgument, "addition"),
        ({"use_kl_loss": True, "kl_coef": 0.1}, InvalidArgument, "--kl-coef"),
        ({"seq_length": None}, InvalidArgument, "--seq-length"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tiny_dense: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says.replace("-", "[-]")):
        train(tmp_path / "ledger", tiny_dense, **options)
    with open_ledger(tmp_path / "ledger") as ledger:
        assert ledger.runs() == []


def test_several_steps_a_rollout_and_a_kl_to_the_reference(
    tiny_dense: Path, tmp_path: Path
) -> None:
    result = train(
        tmp_path / "ledger",
        tiny_dense,
        num_steps_per_rollout=2,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="low_var_kl",
        calculate_per_token_loss=True,
    )
    assert result["weight_version"] == 4
    with open_ledger(tmp_path / "ledger") as ledger:
        reader = ledger.reader("run")
        steps = reader.sql(
            "select rollout_step, step_in_rollout, len(indices) as n, "
            "metric_values[list_position(metric_names, 'ref_kl')] as kl "
            "from step_committed order by step"
        ).to_pylist()
    assert [(s["rollout_step"], s["step_in_rollout"], s["n"]) for s in steps] == [
        (0, 0, 4),
        (0, 1, 4),
        (1, 0, 4),
        (1, 1, 4),
    ]
    assert steps[0]["kl"] == 0.0
    assert steps[-1]["kl"] > 0.0
