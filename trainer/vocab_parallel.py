"""Log-softmax over a vocabulary that is divided over the ranks of a tensor-parallel group.

n tokens, V the columns of this rank; rank r has the ids from r · V on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.kept_sets import KeptSets
from trainer.megatron import parallel_state

__all__ = ["EXCLUDED", "exclude_padding", "log_probs_over_ranks"]

EXCLUDED = -1e30
"""Logit of what cannot be drawn: e to it is 0, and it is finite, so that 0 times it is 0."""


def exclude_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] of a rank with the rows that pad the vocabulary at EXCLUDED, in place.

    No gradient reaches the padding through them.
    """
    width = logits.shape[-1]
    first = width * int(parallel_state.get_tensor_model_parallel_rank())
    valid = min(max(vocab_size - first, 0), width)
    if valid < width:
        logits[..., valid:] = EXCLUDED
    return logits


def log_probs_over_ranks(
    scaled_nV: Tensor,
    targets_n: Tensor,
    *,
    kept: KeptSets | None = None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """ln p(target) and the entropy in nats, float32 [n] each, the same on every rank of the group.

    `scaled_nV` is float32: this rank's columns of logits divided by the temperature. With `kept`
    the distribution of a token that has a set is over the set alone. A gradient flows into the
    logits of this rank, from the entropy only with `entropy_gradient`.
    """
    first = scaled_nV.shape[-1] * int(parallel_state.get_tensor_model_parallel_rank())
    if kept is not None:
        scaled_nV = scaled_nV.masked_fill(_outside(kept, scaled_nV, first), EXCLUDED)
    log_probs_n, entropy_n = _OverRanks.apply(  # type: ignore[no-untyped-call]
        scaled_nV, targets_n, first, entropy_gradient
    )
    return log_probs_n, entropy_n


def _outside(kept: KeptSets, scaled_nV: Tensor, first: int) -> Tensor:
    """bool [n, V]: columns outside their token's set. A token without a set has none."""
    device, width = scaled_nV.device, scaled_nV.shape[-1]
    rows_K = torch.from_numpy(np.repeat(np.arange(len(kept.lengths_n)), kept.lengths_n)).to(device)
    columns_K = torch.from_numpy(kept.ids_K.astype(np.int64)).to(device) - first
    here_K = (columns_K >= 0) & (columns_K < width)
    has_set_n = torch.from_numpy(kept.lengths_n > 0).to(device)
    outside_nV = has_set_n[:, None].expand(-1, width).contiguous()
    outside_nV[rows_K[here_K], columns_K[here_K]] = False
    return outside_nV


class _OverRanks(torch.autograd.Function):
    """With x the logits, Z = Σ e^x over all ranks and p = e^x / Z:

    log p_t = x_t − ln Z and H = ln Z − Σ p x, so ∂(log p_t)/∂x_j = [j = t] − p_j and
    ∂H/∂x_j = −p_j (log p_j + H). The largest logit of all ranks is taken off first.
    """

    @staticmethod
    def forward(
        ctx: Any, scaled_nV: Tensor, targets_n: Tensor, first: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """The two sums over ranks that both results need travel together."""
        group = parallel_state.get_tensor_model_parallel_group()
        top_n = scaled_nV.max(dim=-1).values
        dist.all_reduce(top_n, op=dist.ReduceOp.MAX, group=group)
        shifted_nV = scaled_nV - top_n[:, None]
        weights_nV = shifted_nV.exp()
        columns_n = targets_n - first
        here_n = (columns_n >= 0) & (columns_n < scaled_nV.shape[-1])
        columns_n = torch.where(here_n, columns_n, 0)
        target_n = shifted_nV.gather(-1, columns_n[:, None])[:, 0]
        sums_3n = torch.stack(
            [
                weights_nV.sum(dim=-1),
                torch.where(here_n, target_n, torch.zeros_like(target_n)),
                (weights_nV * shifted_nV).sum(dim=-1),
            ]
        )
        dist.all_reduce(sums_3n, group=group)
        total_n, target_n, moment_n = sums_3n
        log_total_n = total_n.log()
        entropy_n = log_total_n - moment_n / total_n
        ctx.entropy_gradient = entropy_gradient
        held = (shifted_nV - log_total_n[:, None], entropy_n) if entropy_gradient else ()
        ctx.save_for_backward(weights_nV / total_n[:, None], columns_n, here_n, *held)
        return target_n - log_total_n, entropy_n

    @staticmethod
    def backward(
        ctx: Any, from_log_probs_n: Tensor, from_entropy_n: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Into this rank's logits; nothing is summed over ranks: each has the whole loss."""
        p_nV, columns_n, here_n, *held = ctx.saved_tensors
        gradient_nV = -from_log_probs_n[:, None] * p_nV
        gradient_nV.scatter_add_(
            -1,
            columns_n[:, None],
            torch.where(here_n, from_log_probs_n, torch.zeros_like(from_log_probs_n))[:, None],
        )
        if ctx.entropy_gradient:
            log_p_nV, entropy_n = held
            gradient_nV -= from_entropy_n[:, None] * p_nV * (log_p_nV + entropy_n[:, None])
        return gradient_nV, None, None, None
