"""A loss with a soft gate in place of a clip."""

from __future__ import annotations

import torch

from trainer.algorithms.losses.inputs import LossInputs, TokenLoss
from trainer.algorithms.losses.sequences import log_ratio
from trainer.settings import AlgorithmSettings

__all__ = ["sapo"]

LOG_RATIO_BOUND = 20.0


def sapo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −A · (4/τ) σ(τ(ρ − 1)), τ = `tau_pos` where A > 0, else `tau_neg`.

    At ρ = 1 the slope is that of −ρA, and it dies away on both sides: the gate bounds without ever
    clipping. Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347, eq. 5 and 6.
    TRL calls the temperatures `sapo_temperature_pos` and `_neg`.
    """
    # Bounded: of an infinite ratio the gate's gradient would be 0 · ∞.
    ratio_N = torch.exp(log_ratio(inputs, bound=LOG_RATIO_BOUND))
    tau_N = torch.where(inputs.advantages_N > 0, settings.tau_pos, settings.tau_neg)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1.0)) * (4.0 / tau_N)
    never_N = torch.zeros_like(inputs.mask_N)
    return TokenLoss(
        loss_N=-inputs.advantages_N * gate_N, clipped_low_N=never_N, clipped_high_N=never_N
    )
