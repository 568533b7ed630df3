"""GDPO: several rewards, each normalised by itself, so that none drowns the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.algorithms.advantages.estimate import Floats, missing, whitened
from trainer.algorithms.advantages.groups import group_relative
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = ["gdpo"]


def gdpo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = whiten(Σ_k w_k A_k), A_k the advantage of `grpo` by part k of the reward alone.

    Liu et al. 2026, "GDPO" (arXiv 2601.05242). `gdpo_reward_keys` are the parts, all of them if
    empty; `gdpo_reward_weights` theirs, each 1 if empty. Whitening is over rollouts, each once, as
    in the paper and NeMo-RL; over loss tokens with `gdpo_whitening` "token", as in verl; off
    without `estimator_whitening`. The reward itself is not looked at.

    Raises InvalidArgument: no parts, or a part that is unknown or that a sample lacks.
    """
    if batch.reward_parts_BP is None or not batch.part_names:
        raise missing(
            "gdpo",
            "rewards with parts",
            "take a reward function that returns parts, or another estimator",
        )
    keys = settings.gdpo_reward_keys or batch.part_names
    weights = settings.gdpo_reward_weights or (1.0,) * len(keys)
    summed_E = np.zeros(len(batch.rollout_groups), np.float64)
    for key, weight in zip(keys, weights, strict=True):
        rewards_E = batch.by_rollout(batch.part(key))
        summed_E += weight * group_relative(batch, settings, rewards_E)
    if not settings.estimator_whitening:
        return batch.spread(summed_E)
    if settings.gdpo_whitening == "rollout":
        return batch.spread(_over_rollouts(batch, settings, summed_E))
    summed_N = batch.spread_exact(summed_E)
    out_N = np.zeros(len(summed_N), np.float64)
    out_N[batch.taken_N] = whitened(summed_N[batch.taken_N])
    return out_N.astype(np.float32)


def _over_rollouts(batch: RewardBatch, settings: AlgorithmSettings, summed_E: Floats) -> Floats:
    if not settings.exclude_masked_rollouts:
        return whitened(summed_E)
    counted_E = batch.rollout_tokens > 0
    out_E = np.zeros(len(summed_E), np.float64)
    out_E[counted_E] = whitened(summed_E[counted_E])
    return out_E
