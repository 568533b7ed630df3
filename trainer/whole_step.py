"""The response tokens of a whole step as the losses and corrections see them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trainer.algorithms.losses import LossInputs
from trainer.batch import Batch

__all__ = ["step_inputs"]


def step_inputs(
    batch: Batch,
    advantages_N: npt.NDArray[np.float32],
    log_probs_N: npt.NDArray[np.float32],
    old_log_probs_N: npt.NDArray[np.float32],
) -> LossInputs:
    """All tokens of the step as one micro-batch, on the CPU, without a gradient.

    `log_probs_N` are by the policy in training. 0 wherever the loss mask is 0.
    """
    mask_N = batch.loss_mask_N > 0

    def taken(values_N: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.where(mask_N, values_N, np.float32(0)))

    samples = len(batch.response_lengths_B)
    return LossInputs(
        log_probs_N=taken(log_probs_N),
        old_log_probs_N=taken(old_log_probs_N),
        rollout_log_probs_N=taken(batch.rollout_log_probs_N),
        advantages_N=taken(advantages_N),
        mask_N=torch.from_numpy(mask_N),
        sequence_N=torch.from_numpy(np.repeat(np.arange(samples), batch.response_lengths_B)),
        n_sequences=samples,
    )
