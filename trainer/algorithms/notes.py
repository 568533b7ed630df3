"""What the settings of an algorithm mean for a run, said once at its start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from trainer.algorithms.advantages import ESTIMATORS
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

_DIVIDED = frozenset({"grpo", "gdpo", "pass_at_k"})
_DISCOUNTED = frozenset({"reinforce", "reinforce_plus_plus", "ppo"})
_USED_BY: dict[str, frozenset[str]] = {
    "advantage_deviation": _DIVIDED | {"group_norm"},
    "advantage_epsilon": _DIVIDED | {"group_norm", "maxrl"},
    "discount_masked_tokens": _DISCOUNTED | {"remax"},
    "gamma": _DISCOUNTED,
    "gdpo_reward_keys": frozenset({"gdpo"}),
    "gdpo_reward_weights": frozenset({"gdpo"}),
    "gdpo_whitening": frozenset({"gdpo"}),
    "grpo_std_scope": frozenset({"grpo", "gdpo"}),
    "lambd": frozenset({"ppo"}),
    "remax_baseline_key": frozenset({"remax"}),
    "use_leave_one_out_baseline": frozenset({"grpo", "gdpo"}),
}
"""Settings that some estimators look at and others do not."""


def algorithm_notes(
    settings: AlgorithmSettings,
    *,
    n_samples_per_prompt: int,
    group_filter: str | None = None,
    given: Collection[str] = (),
) -> list[str]:
    """Sentences for the reader of a run's first lines; none where there is nothing to say.

    `group_filter` is the dynamic sampling filter by its name, None where groups are not filtered;
    `given` are the options that were said explicitly.
    """
    name = settings.advantage_estimator
    notes = []
    if n_samples_per_prompt == 1:
        notes.append(_one_sample(settings))
        if group_filter == "check_reward_nonzero_std":
            notes.append(
                "--dynamic-sampling-filter-path check_reward_nonzero_std drops every group of one "
                "rollout: give 'none'"
            )
    if name in ESTIMATORS:
        defaults = {f.name: f.default for f in fields(AlgorithmSettings)}
        unused = [
            setting
            for setting, estimators in sorted(_USED_BY.items())
            if setting in given
            and name not in estimators
            and getattr(settings, setting) != defaults[setting]
        ]
        if unused:
            flags = ", ".join(f"--{setting.replace('_', '-')}" for setting in unused)
            notes.append(f"--advantage-estimator {name} does not look at {flags}")
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
