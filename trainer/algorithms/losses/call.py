"""Calls the loss that the settings name, and checks what a custom one returns."""

from __future__ import annotations

from dataclasses import replace

import torch

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.losses.inputs import LossInputs, TokenLoss
from trainer.algorithms.losses.names import POLICY_LOSSES
from trainer.algorithms.registry import resolve
from trainer.settings import AlgorithmSettings

__all__ = ["policy_loss"]


def policy_loss(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """The loss of each token by `settings.policy_loss`.

    Where the mask is False the loss sees 0 for all floats, so that no overflow there can make a
    product with a weight of 0 NaN; the gradient there is 0.

    Raises InvalidArgument: unknown loss; a custom one that raised, returned another type, shape or
    dtype, or a loss without a gradient where `log_probs_N` has one.
    """
    name = settings.policy_loss
    function = resolve(POLICY_LOSSES, name, setting="--policy-loss")
    result: object = function(_zeroed(inputs), settings)
    shape = tuple(inputs.log_probs_N.shape)
    if not isinstance(result, TokenLoss):
        found = type(result).__name__
    elif not isinstance(result.loss_N, torch.Tensor):
        found = f"loss_N that is a {type(result.loss_N).__name__}"
    elif result.loss_N.shape != shape or result.loss_N.dtype != torch.float32:
        found = f"{result.loss_N.dtype}, shape {tuple(result.loss_N.shape)}"
    elif any(
        not isinstance(clipped_N, torch.Tensor)
        or clipped_N.shape != shape
        or clipped_N.dtype != torch.bool
        for clipped_N in (result.clipped_low_N, result.clipped_high_N)
    ):
        found = "clipped_low_N or clipped_high_N that is not a bool tensor of this shape"
    elif (
        torch.is_grad_enabled()
        and inputs.log_probs_N.requires_grad
        and not result.loss_N.requires_grad
    ):
        found = "a loss that does not depend on log_probs_N: it has no gradient"
    else:
        return result
    raise InvalidArgument(
        explain(
            "computing the policy loss",
            on=f"--policy-loss {name}",
            expected=f"a TokenLoss with float32 loss_N and bool clips, each of shape {shape}",
            found=found,
        )
    )


def _zeroed(inputs: LossInputs) -> LossInputs:
    mask_N = inputs.mask_N
    return replace(
        inputs,
        log_probs_N=torch.where(mask_N, inputs.log_probs_N, 0.0),
        old_log_probs_N=torch.where(mask_N, inputs.old_log_probs_N, 0.0),
        rollout_log_probs_N=torch.where(mask_N, inputs.rollout_log_probs_N, 0.0),
        advantages_N=torch.where(mask_N, inputs.advantages_N, 0.0),
    )
