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
    """The N response tokens of a micro-batch, its samples one after the other: float32 [N] but
    where it says otherwise.

    Nothing here knows of rows, padding or ranks. Values where the mask is False mean nothing; they
    are finite.
    """

    log_probs_N: torch.Tensor
    old_log_probs_N: torch.Tensor
    rollout_log_probs_N: torch.Tensor
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    """bool: True where the token enters the loss."""
    sequence_N: torch.Tensor
    """int64: number of the token's sample within the micro-batch, ascending from 0."""
    n_sequences: int
    """Samples of the micro-batch. One without response tokens has a number all the same."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenLoss:
    """What a policy loss returns."""

    loss_N: torch.Tensor
    """float32 [N], with gradient; not masked, not averaged."""
    clipped_low_N: torch.Tensor
    """bool [N]: the lower clip took the gradient away."""
    clipped_high_N: torch.Tensor
    """bool [N]: the upper clip took the gradient away."""


PolicyLoss = Callable[[LossInputs, AlgorithmSettings], TokenLoss]


def ppo_clip(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A), ρ = e^(log_probs − old_log_probs).

    Schulman et al. 2017, "Proximal Policy Optimization", eq. 7, negated; asymmetric clip: Yu et al.
    2025, "DAPO", §3.1. With `eps_clip_c` = c, where A < 0: min(L, −cA), Ye et al. 2020, eq. 5
    ("dual clip"). `eps_clip_high` None means `eps_clip`.
    """
    low = settings.eps_clip
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    advantages_N = inputs.advantages_N
    ratio_N = torch.exp(inputs.log_probs_N - inputs.old_log_probs_N)
    unclipped_N = -ratio_N * advantages_N
    clipped_N = -torch.clamp(ratio_N, 1.0 - low, 1.0 + high) * advantages_N
    loss_N = torch.maximum(unclipped_N, clipped_N)
    if settings.eps_clip_c is not None:
        bound_N = -settings.eps_clip_c * advantages_N
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
    with torch.no_grad():
        bites_N = clipped_N > unclipped_N
        return TokenLoss(
            loss_N=loss_N,
            clipped_low_N=bites_N & (advantages_N < 0),
            clipped_high_N=bites_N & (advantages_N > 0),
        )


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip}
"""Policy losses by the name that `--policy-loss` takes."""


def policy_loss(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """The loss of each token by `settings.policy_loss`.

    Raises InvalidArgument: unknown loss; a custom one that raised, returned another type, shape or
    dtype, or a loss without a gradient where `log_probs_N` has one.
    """
    name = settings.policy_loss
    result: object = resolve(POLICY_LOSSES, name, setting="--policy-loss")(inputs, settings)
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
