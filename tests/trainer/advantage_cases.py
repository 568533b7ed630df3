"""Short ways to say a batch of rewards and to estimate on it, for the tests of advantages."""

from __future__ import annotations

import numpy as np

from trainer.algorithms.advantages import ESTIMATORS, Estimate, estimate
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

EVERY = sorted(ESTIMATORS)
GROUPED = (
    "dr_grpo",
    "gpg",
    "group_norm",
    "grpo",
    "maxrl",
    "mean_baseline",
    "opo",
    "pass_at_k",
    "rloo",
)
"""One advantage a rollout, by its group."""


def batch(rewards, groups=None, rollouts=None, lengths=None, mask=None, kl=None, **more):
    """One token a sample, one sample a rollout and one group, unless it is said otherwise."""
    n = len(rewards)
    lengths = np.asarray(lengths if lengths is not None else [1] * n, np.int64)

    def floats(values, dtype):
        return None if values is None else np.asarray(values, dtype)

    parts = more.get("parts")
    return RewardBatch(
        rewards_B=np.asarray(rewards, np.float64),
        group_index_B=np.asarray(groups if groups is not None else [0] * n, np.int64),
        rollout_id_B=np.asarray(rollouts if rollouts is not None else range(n), np.int64),
        response_lengths_B=lengths,
        loss_mask_N=np.asarray(mask if mask is not None else [1] * int(lengths.sum()), np.uint8),
        kl_N=floats(kl, np.float32),
        log_probs_N=floats(more.get("log_probs"), np.float32),
        teacher_log_probs_N=floats(more.get("teacher"), np.float32),
        values_N=floats(more.get("values"), np.float32),
        baseline_rewards_B=floats(more.get("greedy"), np.float64),
        part_names=() if parts is None else tuple(parts),
        reward_parts_BP=None
        if parts is None
        else np.array(list(parts.values()), np.float64).T.reshape(n, len(parts)),
    )


INPUTS = ("groups", "rollouts", "lengths", "mask", "kl", "log_probs", "teacher", "values")
INPUTS += ("greedy", "parts")


def full(name: str, rewards, **said) -> Estimate:
    """Estimate with settings and inputs by their names."""
    inputs = {key: said.pop(key) for key in INPUTS if key in said}
    return estimate(batch(rewards, **inputs), AlgorithmSettings(advantage_estimator=name, **said))


def advantages(name: str, rewards, **said):
    return full(name, rewards, **said).advantages_N


def complete(rewards, **said):
    """As `batch`, with every input that some estimator needs: zeros, or the reward as a part."""
    made = batch(rewards, **said)
    n_tokens = len(made.loss_mask_N)
    zeros = np.zeros(n_tokens, np.float32)
    return RewardBatch(
        rewards_B=made.rewards_B,
        group_index_B=made.group_index_B,
        rollout_id_B=made.rollout_id_B,
        response_lengths_B=made.response_lengths_B,
        loss_mask_N=made.loss_mask_N,
        kl_N=zeros,
        log_probs_N=zeros,
        teacher_log_probs_N=zeros,
        values_N=zeros,
        baseline_rewards_B=made.rewards_B,
        part_names=("reward",),
        reward_parts_BP=made.rewards_B[:, None],
    )
