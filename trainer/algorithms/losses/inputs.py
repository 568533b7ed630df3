"""What a policy loss is given and what it returns. Torch, flat, one micro-batch.

n response tokens of a micro-batch, the samples one after the other, whatever rows, packing or ranks
they lie in. A sample never spans two micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.settings import AlgorithmSettings

__all__ = ["LossInputs", "PolicyLoss", "TokenLoss"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """Three log-probabilities of each token stand beside each other and are never mixed up.

    All are float32 [n] but where stated. Values where the mask is False mean nothing; they are
    finite.
    """

    log_probs_N: torch.Tensor
    """By the policy in training, with gradient."""
    old_log_probs_N: torch.Tensor
    """By the policy that the ratio is taken against."""
    rollout_log_probs_N: torch.Tensor
    """By the engine that sampled."""
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    """bool: True where the token enters the loss."""
    sequence_N: torch.Tensor
    """int64: number of the token's sample in the micro-batch, from 0, never falling."""
    n_sequences: int
    """Samples of the micro-batch; one may have no token."""
    restrained_N: torch.Tensor | None = None
    """bool: tokens that a loss picked out of the whole step before, see `covariance`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenLoss:
    """What a policy loss returns."""

    loss_N: torch.Tensor
    """float32 [n], with gradient; not masked, not averaged. Finite wherever it is masked out."""
    clipped_low_N: torch.Tensor
    """bool [n]: the lower bound (of the ratio, or what the loss has in its place) bites."""
    clipped_high_N: torch.Tensor
    """bool [n]: the upper bound bites."""


PolicyLoss = Callable[[LossInputs, AlgorithmSettings], TokenLoss]
