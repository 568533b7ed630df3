"""Policy losses: one loss value a token, from log-probabilities and advantages. Torch, float32.

Three log-probabilities stand beside each other and are never mixed up: `log_probs` of the policy
being trained (with gradient), `old_log_probs` of the policy that the ratio is taken against, and
`rollout_log_probs` of the engine that sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.registry import resolve
from trainer.settings import AlgorithmSettings

__all__ = ["POLICY_LOSSES", "LossInputs", "PolicyLoss", "TokenLoss", "policy_loss", "ppo_clip"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """Rows are samples, columns the tokens that they predict: all float32 [B, T] but the mask.

    Values where the mask is False mean nothing; they are finite.
    """

    log_probs_BT: torch.Tensor
    old_log_probs_BT: torch.Tensor
    rollout_log_probs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    """bool: True where the token enters the loss."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenLoss:
    """What a policy loss returns."""

    loss_BT: torch.Tensor
    """float32 [B, T], with gradient; not masked, not averaged."""
    clipped_low_BT: torch.Tensor
    """bool [B, T]: the lower clip took the gradient away."""
    clipped_high_BT: torch.Tensor
    """bool [B, T]: the upper clip took the gradient away."""


PolicyLoss = Callable[[LossInputs, AlgorithmSettings], TokenLoss]


def ppo_clip(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A), ρ = e^(log_probs − old_log_probs).

    Schulman et al. 2017, "Proximal Policy Optimization", eq. 7, negated; asymmetric clip: Yu et al.
    2025, "DAPO", §3.1. With `eps_clip_c` = c, where A < 0: min(L, −cA), Ye et al. 2020, eq. 5
    ("dual clip"). `eps_clip_high` None means `eps_clip`.
    """
    low = settings.eps_clip
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    advantages_BT = inputs.advantages_BT
    ratio_BT = torch.exp(inputs.log_probs_BT - inputs.old_log_probs_BT)
    unclipped_BT = -ratio_BT * advantages_BT
    clipped_BT = -torch.clamp(ratio_BT, 1.0 - low, 1.0 + high) * advantages_BT
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    if settings.eps_clip_c is not None:
        bound_BT = -settings.eps_clip_c * advantages_BT
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)
    with torch.no_grad():
        bites_BT = clipped_BT > unclipped_BT
        return TokenLoss(
            loss_BT=loss_BT,
            clipped_low_BT=bites_BT & (advantages_BT < 0),
            clipped_high_BT=bites_BT & (advantages_BT > 0),
        )


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip}
"""Policy losses by the name that `--policy-loss` takes."""


def policy_loss(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """The loss of each token by `settings.policy_loss`.

    Raises InvalidArgument: unknown loss; a custom one that raised, returned another type, shape or
    dtype, or a loss without a gradient where `log_probs_BT` has one.
    """
    name = settings.policy_loss
    result: object = resolve(POLICY_LOSSES, name, setting="--policy-loss")(inputs, settings)
    shape = tuple(inputs.log_probs_BT.shape)
    if not isinstance(result, TokenLoss):
        found = type(result).__name__
    elif not isinstance(result.loss_BT, torch.Tensor):
        found = f"loss_BT that is a {type(result.loss_BT).__name__}"
    elif result.loss_BT.shape != shape or result.loss_BT.dtype != torch.float32:
        found = f"{result.loss_BT.dtype}, shape {tuple(result.loss_BT.shape)}"
    elif any(
        not isinstance(clipped_BT, torch.Tensor)
        or clipped_BT.shape != shape
        or clipped_BT.dtype != torch.bool
        for clipped_BT in (result.clipped_low_BT, result.clipped_high_BT)
    ):
        found = "clipped_low_BT or clipped_high_BT that is not a bool tensor of this shape"
    elif (
        torch.is_grad_enabled()
        and inputs.log_probs_BT.requires_grad
        and not result.loss_BT.requires_grad
    ):
        found = "a loss that does not depend on log_probs_BT: it has no gradient"
    else:
        return result
    raise InvalidArgument(
        explain(
            "computing the policy loss",
            on=f"--policy-loss {name}",
            expected=f"a TokenLoss with float32 loss_BT and bool clips, each of shape {shape}",
            found=found,
        )
    )
