"""What the settings of an algorithm mean for a run, said once at its start."""

from __future__ import annotations

from collections.abc import Collection

from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.unused import unused_settings
from trainer.settings import AlgorithmSettings

__all__ = ["COMPARED", "algorithm_notes"]

COMPARED = frozenset(
    {
        "dr_grpo",
        "gdpo",
        "gpg",
        "group_norm",
        "grpo",
        "maxrl",
        "mean_baseline",
        "opo",
        "pass_at_k",
        "reinforce_plus_plus_baseline",
        "rloo",
    }
)
"""Estimators that compare the rollouts of a group."""


def algorithm_notes(
    settings: AlgorithmSettings,
    *,
    n_samples_per_prompt: int,
    global_batch_size: int | None = None,
    group_filter: str | None = None,
    given: Collection[str] = (),
) -> list[str]:
    """Sentences for the reader of a run's first lines; none where there is nothing to say.

    `global_batch_size` are the samples of an optimizer step; `group_filter` is the dynamic sampling
    filter by its name, None where groups are not filtered; `given` are the options that were said
    explicitly.
    """
    notes = []
    if n_samples_per_prompt == 1:
        notes.append(_one_sample(settings))
        if group_filter == "check_reward_nonzero_std":
            notes.append(
                "--dynamic-sampling-filter-path check_reward_nonzero_std drops every group of one "
                "rollout: give 'none'"
            )
    if global_batch_size is not None and global_batch_size % n_samples_per_prompt:
        notes.append(
            f"--global-batch-size {global_batch_size} cuts groups of {n_samples_per_prompt} "
            "samples between optimizer steps, each of which knows its own samples alone; make it a "
            "multiple of --n-samples-per-prompt"
        )
    notes += unused_settings(settings, given)
    return notes


def _one_sample(settings: AlgorithmSettings) -> str:
    name = settings.advantage_estimator
    said = f"--n-samples-per-prompt 1 with --advantage-estimator {name}: "
    if name not in ESTIMATORS:
        return said + "what a rollout gets that has no others of its group is up to it"
    if name not in COMPARED:
        return said + "it compares no rollouts of a group, so one is enough"
    if name == "pass_at_k":
        return said + "there is no second best, so every advantage is 0 and nothing is learned"
    if settings.single_sample_advantage == "reward":
        return said + "each rollout's advantage is its own reward, without a baseline"
    return (
        said + "a rollout has nothing to compare with, so every advantage is 0 and rewards teach "
        "nothing; ask for more samples, set --single-sample-advantage reward, or take an estimator "
        "that compares none"
    )
