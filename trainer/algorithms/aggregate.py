"""How the losses of tokens become the loss of a step: a weighted sum, its weights known before.

Loss = Σ_t w_t · x_t over all tokens of the step. Because w depends on the masks alone,
micro-batches add up without knowing of each other, whatever the partition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["token_weights"]


def token_weights(
    loss_mask_N: npt.NDArray[np.uint8],
    response_lengths_B: npt.NDArray[np.int64],
    rollout_id_B: npt.NDArray[np.int64],
    *,
    calculate_per_token_loss: bool,
    global_batch_size: int,
) -> npt.NDArray[np.float32]:
    """The weight [N] of each response token in the loss of the step; 0 where the mask is 0.

    By default each rollout weighs 1/global_batch_size, shared evenly by the loss tokens of all its
    samples: w = m / (Σ m of its rollout) / global_batch_size. Siblings thus share one denominator
    (slime, `cp_utils.py`: `rollout_mask_sums`). `global_batch_size` counts rollouts.

    With `calculate_per_token_loss` each token weighs the same: w = m / Σ m of the step.

    A rollout without a loss token contributes nothing; a step without one has weights 0 throughout.
    """
    mask_N = (loss_mask_N > 0).astype(np.float64)
    if calculate_per_token_loss:
        return np.asarray(mask_N / max(mask_N.sum(), 1.0), np.float32)
    _, rollout_B = np.unique(rollout_id_B, return_inverse=True)
    rollout_N = np.repeat(rollout_B.reshape(-1), response_lengths_B)
    tokens_E = np.bincount(rollout_N, weights=mask_N, minlength=len(np.unique(rollout_id_B)))
    # 1, not 0: such a rollout has no token with mask 1, so its weights are 0 anyway.
    denominators_N = np.maximum(tokens_E, 1.0)[rollout_N] * global_batch_size
    return np.asarray(mask_N / denominators_N, np.float32)
