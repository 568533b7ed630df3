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
    # Beyond ±20 k3 is above 10, so the inner clamp changes no value; without it e^(−d) overflows,
    # and the gradient is 0 · ∞.
    bounded = torch.clamp(d, -D_CLAMP, D_CLAMP)
    return torch.clamp(k3(bounded), -LOW_VAR_CLAMP, LOW_VAR_CLAMP)


KL_TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}
"""KL estimators by the name that `--kl-loss-type` takes: functions of d."""


def approximate_kl(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kl_type: str
) -> torch.Tensor:
    """KL of each token, float32, shape of the arguments. Raises InvalidArgument: unknown type."""
    estimator = resolve(KL_TYPES, kl_type, setting="--kl-loss-type")
    return estimator(log_probs.float() - ref_log_probs.float())
