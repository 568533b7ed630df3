"""What a step must have at hand before its loss, by its settings."""

from __future__ import annotations

from trainer.algorithms.correction_names import correction_name
from trainer.settings import AlgorithmSettings

__all__ = ["needs_old_log_probs", "needs_teacher", "needs_values", "reward_parts_used"]


def needs_old_log_probs(settings: AlgorithmSettings) -> bool:
    """Whether old log-probs must be scored by a forward of their own before the step.

    Elsewhere those of a rollout's first step are the detached current ones, which every micro-batch
    has for itself. MIS with `mis_batch_normalize` needs those of the whole step at once.
    """
    return (
        settings.use_tis
        and settings.mis_batch_normalize
        and correction_name(settings.custom_tis_function_path) == "mis"
    )


def needs_values(algorithm: AlgorithmSettings) -> bool:
    """Whether the estimator asks a critic for the value of each token."""
    return algorithm.advantage_estimator == "ppo"


def needs_teacher(algorithm: AlgorithmSettings) -> bool:
    """Whether log-probs by a teacher enter the advantages."""
    return algorithm.use_opd or algorithm.advantage_estimator == "on_policy_distillation"


def reward_parts_used(algorithm: AlgorithmSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the parts that the rewards have, those that enter the step.

    What a custom estimator looks at is not known: its parts are left out.
    """
    if algorithm.advantage_estimator == "gdpo":
        return algorithm.gdpo_reward_keys or names
    if algorithm.advantage_estimator == "remax":
        return tuple(name for name in names if name == algorithm.remax_baseline_key)
    return ()
