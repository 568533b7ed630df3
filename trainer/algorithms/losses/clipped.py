"""Losses of a clipped ratio: PPO, and its sequence-wise relatives GSPO and GMPO."""

from __future__ import annotations

import torch

from trainer.algorithms.losses.inputs import LossInputs, TokenLoss
from trainer.algorithms.losses.sequences import log_ratio, sequence_mean
from trainer.settings import AlgorithmSettings

__all__ = ["clip_range", "clipped_surrogate", "gmpo", "gspo", "ppo_clip"]


def clip_range(settings: AlgorithmSettings) -> tuple[float, float]:
    """ε and ε_high: how far below and above 1 the ratio may go."""
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return settings.eps_clip, high


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, settings: AlgorithmSettings
) -> TokenLoss:
    """L = max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A); with c, where A < 0: min(L, −cA)."""
    low, high = clip_range(settings)
    unclipped_N = -ratio_N * advantages_N
    clipped_N = -torch.clamp(ratio_N, 1.0 - low, 1.0 + high) * advantages_N
    loss_N = torch.maximum(unclipped_N, clipped_N)
    if settings.eps_clip_c is not None:
        bound_N = -settings.eps_clip_c * advantages_N
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
    with torch.no_grad():
        bites_N = clipped_N > unclipped_N
        return TokenLoss(
            loss_N=loss_N,
            clipped_low_N=bites_N & (advantages_N < 0),
            clipped_high_N=bites_N & (advantages_N > 0),
        )


def ppo_clip(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A), ρ = e^(log_probs − old_log_probs).

    Schulman et al. 2017, "Proximal Policy Optimization", eq. 7, negated; asymmetric clip: Yu et al.
    2025, "DAPO", §3.1. With `eps_clip_c` = c, where A < 0: min(L, −cA), Ye et al. 2020, eq. 5
    ("dual clip"). `eps_clip_high` None means `eps_clip`.
    """
    return clipped_surrogate(torch.exp(log_ratio(inputs)), inputs.advantages_N, settings)


def gspo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """As `ppo_clip`, of the ratio of the whole sample: s = exp(mean of log_probs − old_log_probs).

    Every token of a sample has the ratio s; the mean is over its tokens that enter the loss, and
    the gradient goes through all of them. Zheng et al. 2025, "Group Sequence Policy Optimization",
    eq. 5 and 7. Its clip ranges are far below PPO's (the paper: 3e-4 and 4e-4). slime files it
    under `--advantage-estimator gspo`, TRL under `importance_sampling_level="sequence"`.
    """
    ratio_N = torch.exp(sequence_mean(log_ratio(inputs), inputs))
    return clipped_surrogate(ratio_N, inputs.advantages_N, settings)


def gmpo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −A · exp(mean of l̃), the geometric mean of the sample's clipped ratios.

    l̃ is the token's log-ratio, clipped to [−ε, ε_high] where that makes the objective smaller (the
    clip is in log space, so ε = 0.4 is a ratio of e^±0.4), and A the mean advantage of the sample.
    Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv 2507.20673; verl calls it
    `geo_mean`.

    Every token of a sample has the sample's loss: their weights in a mean over tokens make it the
    sample's again. An off-policy correction is then averaged over the tokens arithmetically, where
    verl takes its geometric mean.
    """
    low, high = clip_range(settings)
    log_ratio_N = log_ratio(inputs)
    sign_N = torch.sign(inputs.advantages_N)
    clamped_N = torch.clamp(log_ratio_N, -low, high)
    smaller_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clamped_N)
    advantages_N = sequence_mean(inputs.advantages_N, inputs)
    with torch.no_grad():
        clipped_N = log_ratio_N != clamped_N
        low_N = clipped_N & (log_ratio_N < 0) & (inputs.advantages_N < 0)
        high_N = clipped_N & (log_ratio_N > 0) & (inputs.advantages_N > 0)
    return TokenLoss(
        loss_N=-advantages_N * torch.exp(sequence_mean(smaller_N, inputs)),
        clipped_low_N=low_N,
        clipped_high_N=high_N,
    )
