"""Options of losses and corrections."""

from __future__ import annotations

from trainer.options.option import ANY, Option
from trainer.ranges import above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "policy_loss",
        "algorithm",
        str,
        "ppo_clip",
        "how advantages become a loss: ppo_clip, gspo, cispo, gmpo, sapo, dppo_tv, dppo_kl, "
        "clip_cov, kl_cov, reinforce, vespo, or 'package.module:function'",
    ),
    Option(
        "eps_clip", "algorithm", float, 0.2, "lower clip range of the ratio", within=at_least(0, 1)
    ),
    Option(
        "eps_clip_high",
        "algorithm",
        float,
        None,
        "upper clip range; default: as --eps-clip",
        within=at_least(0),
    ),
    Option(
        "eps_clip_c", "algorithm", float, None, "dual clip, above 1; off if unset", within=above(1)
    ),
    Option("kl_coef", "algorithm", float, 0.0, "KL to the reference in the reward", within=ANY),
    Option("use_kl_loss", "algorithm", bool, False, "KL to the reference in the loss"),
    Option("kl_loss_coef", "algorithm", float, 0.0, "its weight", within=ANY),
    Option(
        "kl_loss_type",
        "algorithm",
        str,
        "k1",
        "its estimator",
        choices=("k1", "k2", "k3", "low_var_kl"),
    ),
    Option("entropy_coef", "algorithm", float, 0.0, "weight of the entropy bonus", within=ANY),
    Option(
        "calculate_per_token_loss",
        "algorithm",
        bool,
        False,
        "mean over tokens in place of the mean over rollouts",
    ),
    Option(
        "use_rollout_logprobs",
        "algorithm",
        bool,
        False,
        "old log-probs are the engine's (the default with --data recorded)",
    ),
)
