"""Options of policy losses, their aggregation, and off-policy corrections."""

from __future__ import annotations

from trainer.options.option import ANY, Option
from trainer.ranges import above, at_least
from trainer.settings_conditions import AGGREGATIONS

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "loss_aggregation",
        "algorithm",
        str,
        "rollout",
        "how the losses of tokens become that of the step: per rollout (siblings share one "
        "denominator), per token, or by the names of verl and TRL",
        choices=AGGREGATIONS,
    ),
    Option(
        "loss_scale_factor",
        "algorithm",
        float,
        None,
        "tokens that the sum of a sample is divided by, with seq-mean-token-sum-norm and dr_grpo; "
        "default: --rollout-max-response-len",
        within=above(0),
    ),
    Option(
        "use_unbiased_kl",
        "algorithm",
        bool,
        False,
        "weigh the KL in the loss with the ratio of current to old policy",
    ),
    Option(
        "cispo_form",
        "algorithm",
        str,
        "slime",
        "CISPO's clip: 'slime' on both sides, 'canonical' above only",
        choices=("slime", "canonical"),
    ),
    Option("tau_pos", "algorithm", float, 1.0, "SAPO: gate's temperature, A > 0", within=above(0)),
    Option("tau_neg", "algorithm", float, 1.05, "SAPO: gate's temperature, A ≤ 0", within=above(0)),
    Option(
        "clip_cov_ratio",
        "algorithm",
        float,
        0.0002,
        "Clip-Cov: share of the step's tokens that is taken out",
        within=above(0, 1),
    ),
    Option("clip_cov_lb", "algorithm", float, 1.0, "Clip-Cov: covariances above", within=ANY),
    Option("clip_cov_ub", "algorithm", float, 5.0, "Clip-Cov: and below", within=ANY),
    Option(
        "kl_cov_ratio",
        "algorithm",
        float,
        0.0002,
        "KL-Cov: share of the step's tokens that is penalised",
        within=above(0, 1),
    ),
    Option("ppo_kl_coef", "algorithm", float, 1.0, "KL-Cov: weight of the penalty", within=ANY),
    Option("vespo_k_pos", "algorithm", float, 2.0, "VESPO: k where A ≥ 0", within=at_least(0)),
    Option("vespo_lambda_pos", "algorithm", float, 3.0, "VESPO: λ where A ≥ 0", within=above(0)),
    Option("vespo_k_neg", "algorithm", float, 3.0, "VESPO: k where A < 0", within=at_least(0)),
    Option("vespo_lambda_neg", "algorithm", float, 2.0, "VESPO: λ where A < 0", within=above(0)),
    Option(
        "use_tis",
        "algorithm",
        bool,
        False,
        "multiply the policy loss with the importance weight of old to sampling policy (truncated)",
    ),
    Option("tis_clip", "algorithm", float, 2.0, "largest such weight", within=above(0)),
    Option("tis_clip_low", "algorithm", float, 0.0, "smallest such weight", within=at_least(0)),
    Option(
        "custom_tis_function_path",
        "algorithm",
        str,
        None,
        "another correction with --use-tis: 'icepop', 'mis', or 'package.module:function'",
    ),
    Option(
        "mis_level",
        "algorithm",
        str,
        "token",
        "MIS: weight of a token, product over a sample, or geometric mean",
        choices=("token", "sequence", "geometric"),
    ),
    Option(
        "mis_mode",
        "algorithm",
        str,
        "truncate",
        "MIS: cap weights, clip them, or mask tokens out of bounds",
        choices=("truncate", "clip", "mask"),
    ),
    Option("mis_upper_bound", "algorithm", float, 2.0, "MIS: upper bound", within=above(0)),
    Option(
        "mis_lower_bound",
        "algorithm",
        float,
        None,
        "MIS: lower bound; default: 1 / --mis-upper-bound",
        within=at_least(0),
    ),
    Option(
        "mis_veto_threshold",
        "algorithm",
        float,
        None,
        "MIS: ratio of one token below which its sample is rejected; off if unset",
        within=above(0, 1),
    ),
    Option(
        "mis_batch_normalize",
        "algorithm",
        bool,
        False,
        "MIS: divide weights by their mean over the step",
    ),
    Option(
        "use_opsm",
        "algorithm",
        bool,
        False,
        "take samples with a negative advantage out of the policy loss where the policy has "
        "moved away from them",
    ),
    Option(
        "opsm_delta", "algorithm", float, 1e-4, "how far: mean of log-ratios", within=at_least(0)
    ),
    Option(
        "mask_offpolicy_in_partial_rollout",
        "algorithm",
        bool,
        False,
        "only tokens of the newest version of each sample enter the loss",
    ),
)
