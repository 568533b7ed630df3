"""Losses that restrain the few tokens which drive the entropy down: Clip-Cov and KL-Cov.

A token's covariance is (A − mean A)(log π − mean log π), both means over the tokens that enter the
loss. Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models", arXiv 2505.22617, §4.

Tokens are picked out of the whole step, by log-probs that are scored before the training forward
(one more forward for these losses): no partition, packing or number of ranks changes the choice.
verl picks them micro-batch by micro-batch. Nothing is random either: where the paper draws tokens
at random, they are taken at even distances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.algorithms.losses.clipped import clip_range
from trainer.algorithms.losses.inputs import LossInputs, TokenLoss
from trainer.algorithms.losses.sequences import batch_mean, log_ratio
from trainer.settings import AlgorithmSettings

__all__ = ["RESTRAINTS", "clip_cov", "kl_cov", "restrained_tokens"]


def clip_cov(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """PPO's clipped loss, and 0 for some tokens whose covariance lies in (`clip_cov_lb`, `_ub`).

    `clip_cov_ratio` of the step's loss tokens, at least one, are taken out of those in that range
    which the clip itself leaves alone: number ⌊(i + 1/2) · candidates / taken⌋ of them, in order,
    for i = 0, 1, … No dual clip. The tokens that are taken out count as clipped above.
    """
    unclipped_N, clipped_N = _surrogates(inputs, settings)
    chosen_N = _chosen(inputs, settings, clip_cov_tokens)
    with torch.no_grad():
        bites_N = clipped_N > unclipped_N
    return TokenLoss(
        loss_N=torch.where(chosen_N, 0.0, torch.maximum(unclipped_N, clipped_N)),
        clipped_low_N=bites_N & (inputs.advantages_N < 0),
        clipped_high_N=(bites_N & (inputs.advantages_N > 0)) | chosen_N,
    )


def kl_cov(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLoss:
    """L = −ρA, and −ρA + `ppo_kl_coef` · |log ρ| for the tokens of largest covariance.

    They are `kl_cov_ratio` of the step's loss tokens, at least one; of equal covariances the
    earlier tokens. Nothing is clipped: the chosen tokens show as clipped above.
    """
    log_ratio_N = log_ratio(inputs)
    plain_N = -torch.exp(log_ratio_N) * inputs.advantages_N
    chosen_N = _chosen(inputs, settings, kl_cov_tokens)
    penalty_N = settings.ppo_kl_coef * log_ratio_N.abs()
    return TokenLoss(
        loss_N=torch.where(chosen_N, plain_N + penalty_N, plain_N),
        clipped_low_N=torch.zeros_like(inputs.mask_N),
        clipped_high_N=chosen_N,
    )


def clip_cov_tokens(inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor:
    """[n] The tokens that `clip_cov` takes out, of those given."""
    with torch.no_grad():
        unclipped_N, clipped_N = _surrogates(inputs, settings)
        covariance_N = _covariance(inputs)
        candidates = torch.nonzero(
            inputs.mask_N
            & (clipped_N <= unclipped_N)
            & (covariance_N > settings.clip_cov_lb)
            & (covariance_N < settings.clip_cov_ub)
        ).reshape(-1)
        taken = min(_share(settings.clip_cov_ratio, inputs), len(candidates))
        chosen_N = torch.zeros_like(inputs.mask_N)
        if taken:
            # Integers: (2i + 1) · candidates // (2 · taken).
            places = (2 * torch.arange(taken, device=candidates.device) + 1) * len(candidates)
            chosen_N[candidates[places // (2 * taken)]] = True
    return chosen_N


def kl_cov_tokens(inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor:
    """[n] The tokens that `kl_cov` penalises, of those given."""
    with torch.no_grad():
        covariance_N = torch.where(inputs.mask_N, _covariance(inputs), -torch.inf)
        # A stable sort: topk may take either of two equal ones.
        order = torch.sort(covariance_N, descending=True, stable=True).indices
        chosen_N = torch.zeros_like(inputs.mask_N)
        chosen_N[order[: _share(settings.kl_cov_ratio, inputs)]] = True
    return chosen_N


Restraint = Callable[[LossInputs, AlgorithmSettings], torch.Tensor]

RESTRAINTS: dict[str, Restraint] = {"clip_cov": clip_cov_tokens, "kl_cov": kl_cov_tokens}
"""By the name of the policy loss."""


def restrained_tokens(inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor | None:
    """[N] The tokens that the settings' loss restrains, of a whole step; None for other losses."""
    restraint = RESTRAINTS.get(settings.policy_loss)
    return None if restraint is None else restraint(inputs, settings)


def _chosen(inputs: LossInputs, settings: AlgorithmSettings, restraint: Restraint) -> torch.Tensor:
    return restraint(inputs, settings) if inputs.restrained_N is None else inputs.restrained_N


def _surrogates(
    inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """−ρA and −clip(ρ)A."""
    low, high = clip_range(settings)
    ratio_N = torch.exp(log_ratio(inputs))
    clipped_N = -torch.clamp(ratio_N, 1.0 - low, 1.0 + high) * inputs.advantages_N
    return -ratio_N * inputs.advantages_N, clipped_N


def _covariance(inputs: LossInputs) -> torch.Tensor:
    """[n] In float64: near the bounds a rounded mean would decide."""
    advantages_N, log_probs_N = inputs.advantages_N.double(), inputs.log_probs_N.detach().double()
    return (advantages_N - batch_mean(advantages_N, inputs)) * (
        log_probs_N - batch_mean(log_probs_N, inputs)
    )


def _share(ratio: float, inputs: LossInputs) -> int:
    """How many tokens that share of the loss tokens is: at least one, where there is one."""
    tokens = int(inputs.mask_N.sum())
    return min(max(int(ratio * tokens), 1), tokens)
