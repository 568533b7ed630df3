"""Estimators and presets from the command line to the ledger, and run again from there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ledger import open_ledger
from replay.verify import verify_branch
from tests.main_job.job import SMALL, retrain, train
from trainer.cli import run
from trainer.presets import PRESETS, Default
from trainer.settings import ParallelSettings


def test_gdpo_by_parts_of_rewards_is_recorded_replayed_and_forked(
    tiny_dense: Path, tmp_path: Path, monkeypatch
) -> None:
    said = {
        "preset": "verl",
        "advantage_estimator": "gdpo",
        "custom_rm_path": "tests.main_job.rewards:with_parts",
    }
    first = train(tmp_path / "a", tiny_dense, **said)
    assert first["steps"] == 2
    with open_ledger(tmp_path / "a") as ledger:
        reader = ledger.reader("run", branch="main")
        (settings, *_) = reader.table("step_committed").column("settings").to_pylist()
        algorithm = json.loads(settings)["algorithm"]
        started = json.loads(reader.table("run_started").column("settings")[0].as_py())
        signals = reader.table("signal_recorded")
        report = verify_branch(ledger, "run", "main", parallel=ParallelSettings(), seed=42)
    assert algorithm["gdpo_whitening"] == "token"  # of the preset
    assert algorithm["loss_aggregation"] == "token"
    assert started["dynamic_sampling_filter_path"] == "none"
    values = np.concatenate([np.asarray(a) for a in signals.column("advantages").to_pylist()])
    assert np.unique(values).size > 2
    assert report.reproduced, report.verdicts
    assert report.steps == 2
    # The same command goes on, also when the preset sets other values by then; another one forks.
    corrected = (*PRESETS["verl"], Default("eps_clip_high", 0.5, "test"))
    monkeypatch.setitem(PRESETS, "verl", corrected)
    assert train(tmp_path / "a", tiny_dense, **said)["steps"] == 0
    forked = retrain(tmp_path / "a", 1, preset="nemo-rl", advantage_estimator="grpo")
    assert (forked["branch"], forked["steps"]) == ("v1-grpo-preset-nemo-rl", 1)
    assert retrain(tmp_path / "a", 1, preset="nemo-rl", advantage_estimator="grpo")["steps"] == 0


def test_a_run_with_one_sample_says_what_that_means(
    tiny_dense: Path, tmp_path: Path, capsys
) -> None:
    """slime's spelling, too: gspo is grpo with another loss."""
    one = {
        **SMALL,
        "ledger": str(tmp_path / "b"),
        "hf_checkpoint": str(tiny_dense),
        "num_rollout": 1,
        "n_samples_per_prompt": 1,
        "rollout_batch_size": 4,
        "dynamic_sampling_filter_path": "none",
        "advantage_estimator": "gspo",
        "gamma": 0.5,
    }
    assert run(one, show=True)["steps"] == 1
    said = capsys.readouterr()
    text = said.out + said.err
    assert "--n-samples-per-prompt 1 with --advantage-estimator grpo: " in text
    assert "does not look at --gamma" in text
    with open_ledger(tmp_path / "b") as ledger:
        table = ledger.reader("run", branch="main").table("signal_recorded")
    assert all(not np.any(a) for a in table.column("advantages").to_pylist())
