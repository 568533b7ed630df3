"""Metrics of a step, under the names users know. Numpy, float64; a mean over nothing is NaN.

N response tokens of the step, B samples. Tokens that nobody sampled (observations) never enter a
mean over tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "length_metrics",
    "mean_where",
    "mismatch_metrics",
    "ppo_kl",
    "reward_metrics",
    "spread_metrics",
]


def reward_metrics(
    rewards_B: npt.NDArray[np.float64],
    raw_rewards_B: npt.NDArray[np.float64],
    group_index_B: npt.NDArray[np.int64],
    rollout_id_B: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Rewards, each rollout once; groups, and those of them whose rollouts are all alike."""
    _, first_E = np.unique(rollout_id_B, return_index=True)
    rewards_E, groups_E = rewards_B[first_E], group_index_B[first_E]
    groups = np.unique(groups_E)
    zero = sum(
        int(rewards_E[groups_E == g].min() == rewards_E[groups_E == g].max()) for g in groups
    )
    return {
        "reward_mean": float(rewards_E.mean()),
        "reward_std": float(rewards_E.std()),
        "raw_reward_mean": float(raw_rewards_B[first_E].mean()),
        "groups": float(len(groups)),
        "zero_variance_groups": float(zero),
    }


def length_metrics(
    response_lengths_B: npt.NDArray[np.int64], truncated_B: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Response lengths in tokens; share of samples that ended at the limit."""
    return {
        "response_length_mean": float(response_lengths_B.mean()),
        "response_length_max": float(response_lengths_B.max()),
        "truncated_ratio": float(truncated_B.mean()),
    }


def spread_metrics(
    name: str, values_N: npt.NDArray[np.float32], mask_N: npt.NDArray[np.uint8]
) -> dict[str, float]:
    """Mean, standard deviation, smallest and largest of the values where the mask is 1."""
    taken = values_N[mask_N > 0].astype(np.float64)
    if len(taken) == 0:
        taken = np.full(1, np.nan)
    return {
        f"{name}_mean": float(taken.mean()),
        f"{name}_std": float(taken.std()),
        f"{name}_min": float(taken.min()),
        f"{name}_max": float(taken.max()),
    }


def mean_where(values_N: npt.NDArray[np.generic], mask_N: npt.NDArray[np.uint8]) -> float:
    """The mean of the values where the mask is 1."""
    taken = values_N[mask_N > 0].astype(np.float64)
    return float(taken.mean()) if len(taken) else float("nan")


def mismatch_metrics(
    trainer_log_probs_N: npt.NDArray[np.float32],
    rollout_log_probs_N: npt.NDArray[np.float32],
    sampled_N: npt.NDArray[np.uint8],
) -> dict[str, float]:
    """How far the trainer's policy is from the one that sampled, x = trainer − rollout log-prob:

    - `logprob_mismatch_mean`, `_max`: of |x|, in nats;
    - `behaviour_kl`: KL(rollout ‖ trainer), the mean of e^x − 1 − x (k3), in nats;
    - `effective_sample_size`: (Σ w)² / (n Σ w²) with w = e^x a token, a share in (0, 1].

    Over sampled tokens only. A NaN among them shows as NaN.
    """
    sampled = sampled_N > 0
    x = trainer_log_probs_N[sampled].astype(np.float64)
    x -= rollout_log_probs_N[sampled].astype(np.float64)
    if len(x) == 0:
        x = np.full(1, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        kl = float((np.expm1(x) - x).mean())
        weights = np.exp(x - x.max())  # the share does not change with a common factor
        size = float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))
    return {
        "logprob_mismatch_mean": float(np.abs(x).mean()),
        "logprob_mismatch_max": float(np.abs(x).max()),
        "behaviour_kl": kl,
        "effective_sample_size": size,
    }


def ppo_kl(
    log_probs_N: npt.NDArray[np.float32],
    old_log_probs_N: npt.NDArray[np.float32],
    loss_mask_N: npt.NDArray[np.uint8],
) -> float:
    """Mean of old − current log-prob over loss tokens: how far a step starts from the old policy.

    0 in a rollout's first step, whose old policy is the current one.
    """
    taken = loss_mask_N > 0
    moved = old_log_probs_N[taken].astype(np.float64) - log_probs_N[taken].astype(np.float64)
    return float(moved.mean()) if len(moved) else float("nan")
