"""Settings that were asked for and that nothing looks at, said rather than passed over."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.losses import POLICY_LOSS_ALIASES, POLICY_LOSSES
from trainer.algorithms.needs import needs_teacher, needs_values
from trainer.settings import AlgorithmSettings

__all__ = ["unused_settings"]

_DIVIDED = frozenset({"grpo", "gdpo", "pass_at_k"})
_DISCOUNTED = frozenset({"reinforce", "reinforce_plus_plus", "ppo"})
_BY_ESTIMATOR: dict[str, frozenset[str]] = {
    "advantage_deviation": _DIVIDED | {"group_norm"},
    "advantage_epsilon": _DIVIDED | {"group_norm", "maxrl"},
    "discount_masked_tokens": _DISCOUNTED | {"remax"},
    "gamma": _DISCOUNTED,
    "gdpo_reward_keys": frozenset({"gdpo"}),
    "gdpo_reward_weights": frozenset({"gdpo"}),
    "gdpo_whitening": frozenset({"gdpo"}),
    "grpo_std_scope": frozenset({"grpo", "gdpo"}),
    "lambd": frozenset({"ppo"}),
    "remax_baseline_key": frozenset({"remax"}),
    "use_leave_one_out_baseline": frozenset({"grpo", "gdpo"}),
}
"""Settings that some estimators look at and others do not."""

_CLIPPED = frozenset({"ppo_clip", "gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "clip_cov"})
_BY_LOSS: dict[str, frozenset[str]] = {
    "cispo_form": frozenset({"cispo"}),
    "clip_cov_lb": frozenset({"clip_cov"}),
    "clip_cov_ratio": frozenset({"clip_cov"}),
    "clip_cov_ub": frozenset({"clip_cov"}),
    "eps_clip": _CLIPPED,
    "eps_clip_c": frozenset({"ppo_clip", "gspo", "dppo_tv", "dppo_kl"}),
    "eps_clip_high": _CLIPPED,
    "kl_cov_ratio": frozenset({"kl_cov"}),
    "ppo_kl_coef": frozenset({"kl_cov"}),
    "tau_neg": frozenset({"sapo"}),
    "tau_pos": frozenset({"sapo"}),
    "vespo_k_neg": frozenset({"vespo"}),
    "vespo_k_pos": frozenset({"vespo"}),
    "vespo_lambda_neg": frozenset({"vespo"}),
    "vespo_lambda_pos": frozenset({"vespo"}),
}
"""The same of policy losses."""


def unused_settings(settings: AlgorithmSettings, given: Collection[str]) -> list[str]:
    """A sentence for each choice that leaves some of the options `given` without an effect.

    `given` are names of options that were said explicitly; those at their default are not counted.
    What a custom estimator, loss or correction looks at is not known.
    """
    defaults = {f.name: f.default for f in fields(settings)}
    sentences = []
    for choice, names in _choices(settings):
        found = [
            name
            for name in sorted(names)
            if name in given and (name not in defaults or getattr(settings, name) != defaults[name])
        ]
        if found:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in found)
            sentences.append(f"{choice} {flags}")
    return sentences


def _choices(s: AlgorithmSettings) -> Iterator[tuple[str, Collection[str]]]:
    """What was chosen, in words, and the options that it does not look at."""
    estimator, loss = s.advantage_estimator, s.policy_loss
    if estimator in ESTIMATORS:
        yield (
            f"--advantage-estimator {estimator} does not look at",
            [name for name, users in _BY_ESTIMATOR.items() if estimator not in users],
        )
    if loss in POLICY_LOSSES:
        known = POLICY_LOSS_ALIASES.get(loss, loss)
        yield (
            f"--policy-loss {loss} does not look at",
            [name for name, users in _BY_LOSS.items() if known not in users],
        )
    if not s.use_tis:
        yield "without --use-tis nothing looks at", ("tis_clip", "tis_clip_low")
    elif correction_name(s.custom_tis_function_path) == "mis":
        yield "MIS has bounds of its own and does not look at", ("tis_clip", "tis_clip_low")
    if not s.use_opsm:
        yield "without --use-opsm nothing looks at", ("opsm_delta",)
    if s.kl_coef == 0 and not s.use_kl_loss:
        yield (
            "without --kl-coef or --use-kl-loss nothing looks at",
            ("kl_loss_type", "ref_load"),
        )
    if not needs_teacher(s):
        yield (
            "without a teacher in the advantages nothing looks at",
            (
                "opd_kl_coef",
                "opd_teacher_load",
            ),
        )
    if not needs_values(s):
        yield (
            "without a critic nothing looks at",
            (
                "critic_load",
                "critic_lr",
                "critic_lr_warmup_iters",
                "num_critic_only_steps",
                "value_clip",
            ),
        )
