"""Sums and means over the tokens of each sample that enter the loss.

`index_add` visits the tokens in order on the CPU, and is deterministic elsewhere under
`torch.use_deterministic_algorithms`: a sample's sum has the same bits in every micro-batch.
"""

from __future__ import annotations

import torch

from trainer.algorithms.losses.inputs import LossInputs

__all__ = ["batch_mean", "log_ratio", "sequence_mean", "sequence_sum"]


def sequence_sum(values_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[n] Σ of the values with mask True over the token's sample, on each of its tokens."""
    kept_N = torch.where(inputs.mask_N, values_N, 0.0)
    sums_S = kept_N.new_zeros(inputs.n_sequences).index_add(0, inputs.sequence_N, kept_N)
    return sums_S.index_select(0, inputs.sequence_N)


def sequence_mean(values_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[n] The mean instead of the sum; 0 in a sample without a token that enters the loss."""
    counts_N = sequence_sum(torch.ones_like(values_N), inputs)
    return sequence_sum(values_N, inputs) / torch.clamp(counts_N, min=1.0)


def batch_mean(values_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[] The mean over all tokens with mask True; 0 without one."""
    return torch.where(inputs.mask_N, values_N, 0.0).sum() / inputs.mask_N.sum().clamp(min=1)


def log_ratio(inputs: LossInputs, *, bound: float | None = None) -> torch.Tensor:
    """[n] log π(token) − log π_old(token), clamped to ±bound; 0 where the token is in no loss."""
    log_ratio_N = torch.where(inputs.mask_N, inputs.log_probs_N - inputs.old_log_probs_N, 0.0)
    return log_ratio_N if bound is None else torch.clamp(log_ratio_N, -bound, bound)
