"""Critic, teacher, references and a kept old actor in whole runs: recorded, resumed, run again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import open_ledger
from ledger.cli import main as ledger_command
from ledger.encode import events_of
from ledger.errors import Corrupt, InvalidArgument, NotFound
from ledger.events import (
    PromptIssued,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
    SignalRecorded,
)
from replay.verify import verify_branch
from rollout.models.tiny import make_tiny_model
from tests.main_job.job import identity, retrain, train
from trainer.history import read_history
from trainer.settings import ParallelSettings
from trainer.stepping import recorded_settings


def steps_of(ledger: Path, branch: str = "main") -> list[Any]:
    with open_ledger(ledger) as opened:
        history = read_history(opened, "run")
    return sorted(
        (s for v, s in history.steps.items() if history.branch_of[v] == branch),
        key=lambda one: one.step,
    )


def events(ledger: Path, kind: Any) -> list[Any]:
    with open_ledger(ledger) as opened:
        return events_of(opened.reader("run", None).table(kind.KIND), kind)


def require_reproduced(ledger: Path, branch: str = "main", **options: Any) -> int:
    """Run every step again and compare all bits; returns how many steps there were."""
    with open_ledger(ledger) as opened:
        report = verify_branch(
            opened, "run", branch, parallel=ParallelSettings(), seed=42, **options
        )
    assert report.reproduced, report.verdicts[-1].detail
    return report.steps


PPO: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "lambd": 0.9,
    "critic_lr": 1e-2,
    "num_critic_only_steps": 1,
    "num_steps_per_rollout": 2,
    "save_interval": 1,
}


def test_a_critic_learns_beside_the_policy_and_is_restored_and_run_again(tiny_dense, tmp_path):
    whole = train(tmp_path / "whole", tiny_dense, num_rollout=3, **PPO)
    steps = steps_of(tmp_path / "whole")
    assert len({step.critic_root for step in steps}) == 6
    assert len({step.critic_gradient_digest for step in steps}) == 6
    metrics = [dict(zip(s.metric_names, s.metric_values.tolist(), strict=True)) for s in steps]
    assert [m["learning_rate"] for m in metrics] == [0, 0, 1e-3, 1e-3, 1e-3, 1e-3]
    assert {m["critic_learning_rate"] for m in metrics} == {1e-2}
    assert all(m["critic_grad_norm"] > 0 for m in metrics)
    with open_ledger(tmp_path / "whole") as opened:
        weights = read_history(opened, "run").weights
    roots = [weights[v].root for v in range(7)]
    # The critic alone learns in the first rollout step.
    assert roots[0] == roots[1] == roots[2]
    assert len(set(roots)) == 5
    for signal in events(tmp_path / "whole", SignalRecorded):
        taken = signal.loss_mask > 0
        np.testing.assert_allclose(
            signal.returns[taken], (signal.advantages + signal.values)[taken], atol=1e-5
        )
    # Another process goes on with the critic of the checkpoint, and gives the same bits.
    train(tmp_path / "cut", tiny_dense, num_rollout=2, **PPO)
    assert identity(train(tmp_path / "cut", num_rollout=3)) == identity(whole)
    assert require_reproduced(tmp_path / "cut", from_version=2) == 4
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "run" / "v000004" / "critic")
    with pytest.raises(NotFound, match="critic/"):
        train(tmp_path / "cut", num_rollout=4, ignore_checkpoint=6)


def test_a_branch_may_begin_a_critic_and_forget_adams_moments(dense_run, tmp_path):
    shutil.copytree(dense_run[0], tmp_path / "ledger")
    retrain(
        tmp_path / "ledger",
        2,
        branch="critic",
        advantage_estimator="ppo",
        reset_optimizer_states=True,
    )
    steps = steps_of(tmp_path / "ledger", "critic")
    assert [recorded_settings(step).critic.lr for step in steps] == [1e-3, 1e-3]
    assert require_reproduced(tmp_path / "ledger", "critic", from_version=2) == 2


def test_a_teacher_and_another_reference_are_known_by_their_weights(tiny_dense, tmp_path):
    teacher = make_tiny_model(tmp_path / "teacher", warmup_steps=0, seed=5)
    reference = make_tiny_model(tmp_path / "reference", warmup_steps=0, seed=6)
    ledger = tmp_path / "ledger"
    options: dict[str, Any] = {"use_opd": True, "use_kl_loss": True, "kl_loss_coef": 0.1}
    with pytest.raises(InvalidArgument, match="--opd-teacher-load"):
        train(ledger, tiny_dense, num_rollout=1, **options)
    # Refused before the run begins, so its settings may still be others.
    folders = {"opd_teacher_load": str(tmp_path / "none"), "ref_load": str(reference)}
    with pytest.raises(NotFound, match="--opd-teacher-load"):
        train(ledger, tiny_dense, opd_kl_coef=0.5, **options, **folders)
    with pytest.raises(InvalidArgument, match="--use-routing-replay"):
        train(ledger, tiny_dense, use_routing_replay=True)
    train(
        ledger,
        tiny_dense,
        num_rollout=1,
        opd_teacher_load=str(teacher),
        ref_load=str(reference),
        **options,
    )
    (step,) = steps_of(ledger)
    assert recorded_settings(step).models.keys() == {"reference", "teacher"}
    for signal in events(ledger, SignalRecorded):
        assert not np.allclose(signal.teacher_log_probs, signal.ref_log_probs)
        assert not np.allclose(signal.teacher_log_probs, signal.log_probs)
    assert require_reproduced(ledger) == 1
    moved = tmp_path / "moved"
    shutil.move(reference, moved)
    with pytest.raises(NotFound, match="--ref-load"):
        require_reproduced(ledger)
    assert require_reproduced(ledger, places={"ref_load": str(moved)}) == 1
    shutil.copy(teacher / "model.safetensors", moved / "model.safetensors")
    with pytest.raises(Corrupt, match="as the steps recorded"):
        require_reproduced(ledger, places={"ref_load": str(moved)})


def test_the_old_actor_is_the_engines_version(tiny_dense, tmp_path):
    options: dict[str, Any] = {
        "update_weights_interval": 2,
        "keep_old_actor": True,
        "eval_interval": 2,
        "n_eval_prompts": 4,
    }
    whole = train(tmp_path / "whole", tiny_dense, num_rollout=4, **options)
    segments = events(tmp_path / "whole", SegmentGenerated)
    versions = {
        step: {int(v) for s in segments if s.rollout_step == step for v in s.span_versions}
        for step in range(4)
    }
    assert versions == {0: {0}, 1: {0}, 2: {2}, 3: {2}}
    with open_ledger(tmp_path / "whole") as opened:
        weights = read_history(opened, "run").weights
    assert [bool(weights[v].acknowledged_by) for v in range(1, 5)] == [False, True, False, True]
    rollout = {s.index: s.rollout_log_probs for s in segments}
    for signal in events(tmp_path / "whole", SignalRecorded):
        # By the very weights that sampled, and dense: every bit.
        np.testing.assert_array_equal(signal.log_probs, rollout[signal.index])
    train(tmp_path / "cut", tiny_dense, num_rollout=3, **options)
    assert identity(train(tmp_path / "cut", num_rollout=4)) != identity(whole)  # one more eval
    assert [s.batch_digest for s in steps_of(tmp_path / "cut")] == [
        s.batch_digest for s in steps_of(tmp_path / "whole")
    ]
    assert require_reproduced(tmp_path / "cut") == 4
    with pytest.raises(InvalidArgument, match="--keep-old-actor"):
        retrain(tmp_path / "cut", 2, keep_old_actor=True)


def test_remax_takes_a_greedy_samples_reward_as_its_baseline(tiny_dense, tmp_path, monkeypatch):
    ledger = tmp_path / "ledger"
    options: dict[str, Any] = {"advantage_estimator": "remax", "n_samples_per_prompt": 1}
    options |= {"rollout_batch_size": 6, "dynamic_sampling_filter_path": "none"}
    train(ledger, tiny_dense, num_rollout=1, **options)
    prompts, scores = events(ledger, PromptIssued), events(ledger, SampleScored)
    rewards = {score.index: score.reward for score in scores}
    parts = {s.index: dict(zip(s.part_names, s.part_values, strict=True)) for s in scores}
    temperature = {s.index: s.temperature for s in events(ledger, SegmentGenerated)}
    decided = {d.index: (d.decision, d.reason) for d in events(ledger, SampleDecided)}
    signals = {s.index: s for s in events(ledger, SignalRecorded)}
    assert [len(prompt.indices) for prompt in prompts] == [2] * 6
    for prompt in prompts:
        sampled, greedy = prompt.indices.tolist()
        assert (temperature[sampled], temperature[greedy]) == (1.0, 0.0)
        assert decided[greedy] == ("surplus", "baseline")
        assert parts[sampled]["greedy_reward"] == rewards[greedy]
        assert greedy not in signals
        taken = signals[sampled].loss_mask > 0
        advantages = signals[sampled].advantages[taken]
        np.testing.assert_allclose(advantages, rewards[sampled] - rewards[greedy])
    assert len({rewards[p.indices[0]] - rewards[p.indices[1]] for p in prompts}) > 1
    train(ledger, num_rollout=2, **options)
    assert require_reproduced(ledger) == 2
    monkeypatch.setenv("LEDGER_URI", str(ledger))
    assert ledger_command(["check"]) == 0
