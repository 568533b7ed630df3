"""The policy losses by the name that `--policy-loss` takes."""

from __future__ import annotations

from trainer.algorithms.losses.clipped import gmpo, gspo, ppo_clip
from trainer.algorithms.losses.covariance import clip_cov, kl_cov
from trainer.algorithms.losses.gated import sapo
from trainer.algorithms.losses.inputs import PolicyLoss
from trainer.algorithms.losses.weighted import cispo, dppo_kl, dppo_tv, reinforce, vespo

__all__ = ["POLICY_LOSSES", "POLICY_LOSS_ALIASES"]

POLICY_LOSS_ALIASES: dict[str, str] = {
    "vanilla": "ppo_clip",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
}
"""Names that other frameworks (verl) have for the same losses."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reinforce": reinforce,
    "vespo": vespo,
}
POLICY_LOSSES |= {alias: POLICY_LOSSES[name] for alias, name in POLICY_LOSS_ALIASES.items()}
