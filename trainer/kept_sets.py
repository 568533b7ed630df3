"""Log-probabilities over the ids that top-p and top-k left where each token was sampled.

An engine that samples with top-p draws from a distribution that is 0 outside a set. Where the sets
are recorded, old and current log-probs are those of the same distribution: the softmax is taken
over the set alone. n tokens of a micro-batch, K ids of all their sets one after the other, V the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptSets", "log_probs_over_sets"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The sets of some tokens. A token with an empty set has the whole vocabulary."""

    ids_K: npt.NDArray[np.int32]
    lengths_n: npt.NDArray[np.int64]
    """Ids in each token's set."""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """[n+1] Where each set begins."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths_n)])

    def of(self, tokens: npt.NDArray[np.int64]) -> KeptSets:
        """The sets of the tokens numbered `tokens`, in that order."""
        first, lengths = self.offsets[tokens], self.lengths_n[tokens]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return KeptSets(self.ids_K[np.repeat(first, lengths) + within], lengths)


def log_probs_over_sets(
    scaled_nV: Tensor, targets_n: Tensor, sets: KeptSets, *, want_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """ln p(target) over each token's set, float32 [n], and the entropy of it in nats, or None.

    `scaled_nV` float32: logits divided by the temperature. For the set S of a token:
    log p = x_target − ln Σ_{i∈S} e^{x_i}; targets lie in their sets. The largest element of each
    set is taken off first (detached: the result does not depend on it). A gradient flows to the ids
    of the sets alone. Tokens with an empty set: over the whole vocabulary.
    """
    import torch  # the batch has sets without torch

    device = scaled_nV.device
    lengths_n = torch.from_numpy(sets.lengths_n).to(device)
    ids_K = torch.from_numpy(sets.ids_K.astype(np.int64)).to(device)
    n = len(lengths_n)
    row_K = torch.repeat_interleave(torch.arange(n, device=device), lengths_n)
    values_K = scaled_nV[row_K, ids_K]
    top_n = torch.full((n,), -torch.inf, device=device, dtype=scaled_nV.dtype)
    top_n = top_n.scatter_reduce(0, row_K, values_K.detach(), "amax")
    full_n = lengths_n == 0
    top_n = torch.where(full_n, torch.zeros_like(top_n), top_n)
    weights_K = (values_K - top_n[row_K]).exp()
    zeros_n = torch.zeros(n, device=device, dtype=scaled_nV.dtype)
    sum_n = zeros_n.index_add(0, row_K, weights_K)
    # An empty set's logarithm must not meet the gradient: 0 · ∞.
    log_sum_n = torch.where(full_n, torch.ones_like(sum_n), sum_n).log() + top_n
    target_n = scaled_nV.gather(-1, targets_n[:, None])[:, 0]
    over_set_n = target_n - log_sum_n
    entropy_n = None
    if want_entropy:
        moment_n = zeros_n.index_add(0, row_K, weights_K * values_K)
        entropy_n = log_sum_n - moment_n / torch.where(full_n, torch.ones_like(sum_n), sum_n)
    if not bool(full_n.any()):
        return over_set_n, entropy_n
    log_softmax_fV = torch.log_softmax(scaled_nV[full_n], dim=-1)
    log_probs_n = over_set_n.masked_scatter(
        full_n, log_softmax_fV.gather(-1, targets_n[full_n][:, None])[:, 0]
    )
    if entropy_n is not None:
        entropy_n = entropy_n.masked_scatter(
            full_n, -(log_softmax_fV.exp() * log_softmax_fV).sum(-1)
        )
    return log_probs_n, entropy_n
