"""Policy losses: one loss value a token, from log-probabilities and advantages. Torch, float32.

| name | loss of a token | known elsewhere as |
|---|---|---|
| `ppo_clip` | max(−ρA, −clip(ρ)A), dual clip as an option | slime, Miles; verl `vanilla` |
| `gspo` | the same of the sample's mean ratio | slime `--advantage-estimator gspo`; verl `gspo` |
| `cispo` | −sg[clip(ρ)] A log π | slime `--advantage-estimator cispo`; verl, TRL `cispo` |
| `gmpo` | −A · geometric mean of clipped ratios | verl `geo_mean` |
| `sapo` | −A (4/τ) σ(τ(ρ − 1)) | verl, TRL `sapo` |
| `dppo_tv`, `dppo_kl` | −sg[min(ρ, c)] A log π, within a divergence | verl |
| `clip_cov`, `kl_cov` | PPO, tokens of large covariance restrained | verl |
| `reinforce` | −A log π | verl `gpg` and, in its bypass mode, `reinforce` |
| `vespo` | −sg[φ(w)] A log π | TRL `vespo` |

ρ = e^(log_probs − old_log_probs). TRL's `luspo` is `gspo` with `--loss-aggregation
seq-mean-token-sum`.
"""

from __future__ import annotations

from trainer.algorithms.losses.call import policy_loss
from trainer.algorithms.losses.covariance import RESTRAINTS, restrained_tokens
from trainer.algorithms.losses.inputs import LossInputs, PolicyLoss, TokenLoss
from trainer.algorithms.losses.names import POLICY_LOSS_ALIASES, POLICY_LOSSES

__all__ = [
    "POLICY_LOSSES",
    "POLICY_LOSS_ALIASES",
    "RESTRAINTS",
    "LossInputs",
    "PolicyLoss",
    "TokenLoss",
    "policy_loss",
    "restrained_tokens",
]
