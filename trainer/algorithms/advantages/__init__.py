"""Advantage estimators: rewards in, one advantage a response token out. Numpy, float64 inside.

Rewards are grouped by the key `group_index`, never by the shape of the batch, so uneven groups are
right. A rollout counts once in its group, however many samples (sibling segments) it yields. Where
the loss mask is 0 the advantage is 0; a sample that is masked throughout has no other.

| name | advantage | |
|---|---|---|
| `grpo` | (r − μ) / (σ + 1e-6) | `groups` |
| `dr_grpo`, `mean_baseline` | r − μ | `groups` |
| `rloo` | n/(n − 1) · (r − μ) | `groups` |
| `group_norm` | (r − μ) / (σ + 1e-9) | `groups` |
| `maxrl` | (r − μ) / (μ + 1e-6) | `groups` |
| `opo` | r − Σ len·r / Σ len | `groups` |
| `gpg` | α (r − μ) | `groups` |
| `pass_at_k` | the best: (r − r_second) / (σ + 1e-6) | `groups` |
| `reinforce` | G_t | `returns` |
| `reinforce_plus_plus` | G_t, whitened | `returns` |
| `reinforce_plus_plus_baseline` | r − μ − β·kl_t, whitened | `returns` |
| `remax` | G_t − reward of the greedy rollout | `returns` |
| `ppo` | Σ_l (γλ)^l δ_{t+l} | `returns` |
| `gdpo` | Σ_k w_k · grpo(part k), whitened | `gdpo` |
| `on_policy_distillation` | log π_teacher − log π | `distillation` |

r is the rollout's reward less kl_coef · Σ kl over its loss tokens, as in verl and TRL; slime's
`grpo` ignores `kl_coef`. A group of one rollout gives 0 (`single_sample_advantage`).
"""

from __future__ import annotations

from trainer.algorithms.advantages.distillation import on_policy_distillation, teacher_term
from trainer.algorithms.advantages.estimate import Estimate, Estimator, whiten
from trainer.algorithms.advantages.registry import ESTIMATORS, estimate, estimate_advantages

__all__ = [
    "ESTIMATORS",
    "Estimate",
    "Estimator",
    "estimate",
    "estimate_advantages",
    "on_policy_distillation",
    "teacher_term",
    "whiten",
]
