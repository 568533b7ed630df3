"""Losses of the form −w · A · log π, the weight w without a gradient."""

from __future__ import annotations

import math

import torch

from trainer.algorithms.losses.clipped import clip_range
from trainer.algorithms.losses.inputs import LossInputs, TokenLoss
from trainer.algorithms.losses.sequences import log_ratio, sequence_sum
from trainer.settings import AlgorithmSettings

__all__ = ["cispo", "dppo_kl", "dppo_tv", "reinforce", "vespo"]

LOG_RATIO_BOUND = 20.0
"""e^20 is far outside every clip range, and its square is still a float32: nothing overflows."""
LOG_W_LOWEST = math.log(1e-8)
DPPO_TRUNCATION = 20.0
KL_EPSILON = 1e-8


def reinforce(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −A log π: the plain policy gradient. Williams 1992, and the loss of GPG.

    It takes no ratio, so it is right for the first step on fresh rollouts only; with a correction
    (`--use-tis`) also for rollouts of an older policy.
    """
    never_N = torch.zeros_like(inputs.mask_N)
    return TokenLoss(
        loss_N=-inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )


def cispo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −sg[clip(ρ)] · A · log π; sg stops the gradient, so no token loses it.

    MiniMax 2025, "MiniMax-M1", eq. 4 and 5. `cispo_form`:

    - 'slime' (also verl's): clip(ρ, 1 − ε, 1 + ε_high);
    - 'canonical': min(ρ, 1 + ε_high), the paper's experiments, which set no lower bound; TRL gives
      the bound itself (`epsilon_high` there is 1 + ε_high here).
    """
    low, high = clip_range(settings)
    floor = 1.0 - low if settings.cispo_form == "slime" else 0.0
    with torch.no_grad():
        ratio_N = torch.exp(log_ratio(inputs, bound=LOG_RATIO_BOUND))
        weight_N = torch.clamp(ratio_N, floor, 1.0 + high)
        below_N, above_N = ratio_N < floor, ratio_N > 1.0 + high
    return TokenLoss(
        loss_N=-weight_N * inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=below_N,
        clipped_high_N=above_N,
    )


def dppo_tv(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −v · sg[min(ρ, c)] · A · log π, v = 0 where the token's probability has moved too far.

    v = 0 where A > 0 and π − π_old > ε_high, and where A ≤ 0 and π_old − π > ε: the total variation
    of the two-way choice between this token and all others. c = `eps_clip_c`, 20 if unset. arXiv
    2602.04879 (DPPO-Binary-TV; §5.4 for the truncation); as in verl, `eps_clip` and `eps_clip_high`
    are the thresholds. The paper takes the ratio against the policy that sampled:
    add `--use-rollout-logprobs`.
    """
    low, high = clip_range(settings)
    with torch.no_grad():
        moved_N = inputs.log_probs_N.exp() - inputs.old_log_probs_N.exp()
        up_N = (inputs.advantages_N > 0) & (moved_N > high)
        down_N = (inputs.advantages_N <= 0) & (moved_N < -low)
    return _dppo(inputs, settings, up_N, down_N)


def dppo_kl(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """As `dppo_tv`, the distance being KL(π_old ‖ π) of the two-way choice (DPPO-Binary-KL).

    D = p log(p/q) + (1 − p) log((1 − p + δ)/(1 − q + δ)), p = π_old, q = π, δ = 1e-8. v = 0 where
    A > 0, q > p and D > ε_high, and where A ≤ 0, q < p and D > ε.
    """
    low, high = clip_range(settings)
    with torch.no_grad():
        p_N, q_N = inputs.old_log_probs_N.exp(), inputs.log_probs_N.exp()
        # 1 − p is 0 for a token that was certain: δ keeps the logarithm finite.
        rest_N = torch.log((1.0 - p_N + KL_EPSILON) / (1.0 - q_N + KL_EPSILON))
        distance_N = p_N * (inputs.old_log_probs_N - inputs.log_probs_N) + (1.0 - p_N) * rest_N
        up_N = (inputs.advantages_N > 0) & (q_N > p_N) & (distance_N > high)
        down_N = (inputs.advantages_N <= 0) & (q_N < p_N) & (distance_N > low)
    return _dppo(inputs, settings, up_N, down_N)


def _dppo(
    inputs: LossInputs, settings: AlgorithmSettings, up_N: torch.Tensor, down_N: torch.Tensor
) -> TokenLoss:
    truncation = DPPO_TRUNCATION if settings.eps_clip_c is None else settings.eps_clip_c
    with torch.no_grad():
        ratio_N = torch.exp(log_ratio(inputs, bound=LOG_RATIO_BOUND))
        weight_N = torch.where(up_N | down_N, 0.0, torch.clamp(ratio_N, max=truncation))
    return TokenLoss(
        loss_N=-weight_N * inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=down_N,
        clipped_high_N=up_N,
    )


def vespo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −sg[φ(w)] · A · log π, φ(w) = e^λ w^k e^(−λw), w the product of the sample's ratios.

    φ(1) = 1, and φ falls smoothly on both sides: nothing is clipped. (k, λ) are `vespo_k_pos`,
    `vespo_lambda_pos` where A ≥ 0, else `vespo_k_neg`, `vespo_lambda_neg`. arXiv 2602.10693; the
    bounds, ±20 on a token's log-ratio and [log 1e-8, 20] on the sample's, are TRL's. An off-policy
    correction multiplies the loss here; TRL takes it into w.
    """
    with torch.no_grad():
        summed_N = sequence_sum(log_ratio(inputs, bound=LOG_RATIO_BOUND), inputs)
        log_w_N = torch.clamp(summed_N, LOG_W_LOWEST, LOG_RATIO_BOUND)
        positive_N = inputs.advantages_N >= 0
        k_N = torch.where(positive_N, settings.vespo_k_pos, settings.vespo_k_neg)
        lambda_N = torch.where(positive_N, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
        phi_N = torch.exp(lambda_N + k_N * log_w_N - lambda_N * torch.exp(log_w_N))
        never_N = torch.zeros_like(inputs.mask_N)
    return TokenLoss(
        loss_N=-phi_N * inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )
