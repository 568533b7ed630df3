"""Estimators of the Kullback-Leibler divergence from log-probabilities of sampled tokens.

d = log π(token) − log π_ref(token), where tokens were sampled from π. Schulman 2020,
"Approximating KL Divergence". Torch, any shape, element by element; gradients flow.

| name | value | |
|---|---|---|
| `k1` | d | unbiased, may be negative |
| `k2` | d² / 2 | biased, never negative |
| `k3` | e^(−d) − 1 + d | unbiased, never negative |
| `low_var_kl` | k3 clamped to [−10, 10] | as in slime, Miles and verl |
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.algorithms.registry import resolve

__all__ = ["KL_TYPES", "approximate_kl"]

LOW_VAR_CLAMP = 10.0
D_CLAMP = 20.0


def k1(d: torch.Tensor) -> torch.Tensor:
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    return d * d / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    # expm1: e^(−d) − 1 loses every digit of a small d.
    return torch.expm1(-d) + d


def low_var_kl(d: torch.Tensor) -> torch.Tensor:
    """k3 of d within ±20 (Miles); `approximate_kl` clamps it, and a ratio before, to ±10."""
    # Without the bound e^(−d) overflows, and the gradient of the clamp is 0 · ∞.
    return k3(torch.clamp(d, -D_CLAMP, D_CLAMP))


KL_TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}
"""KL estimators by the name that `--kl-loss-type` takes: functions of d."""


def approximate_kl(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    kl_type: str,
    *,
    old_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL of each token, float32, shape of the arguments.

    With `old_log_probs` (`--use-unbiased-kl`) the estimator is multiplied by e^(log_probs −
    old_log_probs), through which the gradient flows too: tokens were sampled from the old policy,
    and so its mean is the KL of the current one. DeepSeek-AI 2025, "DeepSeek-V3.2". As in slime the
    product is taken before `low_var_kl` clamps.

    Raises InvalidArgument: unknown type.
    """
    estimator = resolve(KL_TYPES, kl_type, setting="--kl-loss-type")
    value = estimator(log_probs.float() - ref_log_probs.float())
    if old_log_probs is not None:
        value = value * torch.exp(log_probs.float() - old_log_probs.float())
    return torch.clamp(value, -LOW_VAR_CLAMP, LOW_VAR_CLAMP) if kl_type == "low_var_kl" else value
