"""Branches on recorded trajectories with other losses and corrections: recorded, and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument
from replay.verify import verify_branch
from tests.main_job.job import retrain
from trainer.parallel import initialize
from trainer.settings import ParallelSettings

Run = tuple[Path, dict[str, Any]]


def test_corrected_steps_are_recorded_and_run_again_to_the_bit(copied: Run) -> None:
    """GSPO, the constant of Dr. GRPO, and MIS whose weights have mean 1 over each step."""
    ledger, _ = copied
    result = retrain(
        ledger,
        2,
        branch="corrected",
        policy_loss="gspo",
        loss_aggregation="dr_grpo",
        use_tis=True,
        custom_tis_function_path="mis",
        mis_mode="clip",
        mis_batch_normalize=True,
        use_opsm=True,
    )
    assert result["steps"] == 2
    initialize(ParallelSettings(), seed=42, num_threads=1, deterministic=True)
    with open_ledger(ledger) as opened:
        reader = opened.reader("run", "corrected")
        steps = reader.sql(
            "select settings::json->'algorithm'->'use_rollout_logprobs' as engines, "
            "settings::json->'algorithm'->'loss_scale_factor' as factor, "
            "metric_values[list_position(metric_names, 'mis_mean_is_weight_before_clip')] as mis "
            "from step_committed where branch = 'corrected' order by step"
        ).to_pylist()
        signals = reader.sql(
            "select step, correction_weights, loss_mask from signal_recorded "
            "where branch = 'corrected' order by step"
        ).to_pylist()
        report = verify_branch(opened, "run", "corrected", parallel=ParallelSettings(), seed=42)
    assert report.reproduced, report.verdicts
    # TIS corrects for the policy that sampled, so the ratio is against the trainer's own.
    assert [(s["engines"], float(s["factor"])) for s in steps] == [("false", 8.0)] * 2
    assert all(np.isfinite(s["mis"]) for s in steps)
    for step in {s["step"] for s in signals}:
        of_step = [s for s in signals if s["step"] == step]
        weights = np.concatenate([s["correction_weights"] for s in of_step])
        mask = np.concatenate([s["loss_mask"] for s in of_step]) > 0
        assert weights[mask].mean() == pytest.approx(1.0, abs=1e-5)


def test_the_engines_log_probs_leave_nothing_to_correct(dense_run: Run) -> None:
    with pytest.raises(InvalidArgument, match="--use-tis with --use-rollout-logprobs"):
        retrain(dense_run[0], 2, use_tis=True, use_rollout_logprobs=True)


def test_an_unknown_correction_is_named_before_anything_runs(dense_run: Run) -> None:
    with pytest.raises(InvalidArgument, match="icepop, mis, tis"):
        retrain(dense_run[0], 2, use_tis=True, custom_tis_function_path="iecpop")
