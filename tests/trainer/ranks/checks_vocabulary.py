"""The log-softmax over a divided vocabulary, on this rank's columns."""

from __future__ import annotations

import torch

from trainer.kept_sets import KeptSets
from trainer.megatron import parallel_state
from trainer.vocab_parallel import exclude_padding, log_probs_over_ranks


def own_columns(
    logits_nV: torch.Tensor,
    targets_n: torch.Tensor,
    kept: KeptSets | None,
    vocab_size: int,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy, and the gradient of a weighted sum of both in this rank's logits.

    `logits_nV` has all columns, padding of the vocabulary included.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    mine = logits_nV.chunk(2, dim=-1)[rank].clone().requires_grad_()
    # In place, as on the output of a layer.
    scaled = exclude_padding(mine * 1.0, vocab_size)
    log_probs_n, entropy_n = log_probs_over_ranks(
        scaled, targets_n, kept=kept, entropy_gradient=entropy_gradient
    )
    weights = torch.linspace(-1, 2, len(targets_n))
    total = (weights * log_probs_n).sum()
    if entropy_gradient:
        total = total + (weights.flip(0) * entropy_n).sum()
    total.backward()
    assert mine.grad is not None
    return log_probs_n.detach(), entropy_n.detach(), mine.grad
