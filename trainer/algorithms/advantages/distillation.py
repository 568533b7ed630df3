"""On-policy distillation: the teacher's opinion of each token that the policy sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.algorithms.advantages.estimate import Floats, missing
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = ["on_policy_distillation", "teacher_term"]


def on_policy_distillation(
    batch: RewardBatch, settings: AlgorithmSettings
) -> npt.NDArray[np.float32]:
    """A_t = opd_kl_coef · (log π_teacher − log π), of the sampled token; rewards are ignored.

    Minus the k1 estimate of KL(π ‖ teacher) at the token (reverse KL). Agarwal et al. 2024,
    "On-Policy Distillation of Language Models"; Lu and Thinking Machines Lab 2025, "On-Policy
    Distillation"; slime, `loss.py` (`apply_opd_kl_to_advantages`); NeMo-RL `opd`. log π is the
    policy that the ratio is taken against. Raises InvalidArgument without both log-probs.
    """
    return teacher_term(batch, settings).astype(np.float32)


def teacher_term(batch: RewardBatch, settings: AlgorithmSettings) -> Floats:
    """[N] opd_kl_coef · (log π_teacher − log π) on loss tokens, else 0, in float64."""
    if batch.teacher_log_probs_N is None or batch.log_probs_N is None:
        raise missing(
            settings.advantage_estimator,
            "log-probs of each token by the teacher and by the policy before the step",
            "give a teacher with --opd-teacher-load, or leave distillation out",
        )
    taken = batch.taken_N  # elsewhere both may be infinite, whose difference is a warning
    out_N = np.zeros(len(taken), np.float64)
    out_N[taken] = batch.teacher_log_probs_N[taken].astype(np.float64)
    out_N[taken] -= batch.log_probs_N[taken].astype(np.float64)
    return settings.opd_kl_coef * out_N
