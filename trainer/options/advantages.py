"""Options of advantage estimators."""

from __future__ import annotations

from trainer.options.option import Option
from trainer.ranges import above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "preset",
        "algorithm",
        str,
        None,
        "other defaults for what these frameworks do differently; what is given beside it wins",
        choices=("slime", "miles", "verl", "trl", "nemo-rl"),
    ),
    Option(
        "advantage_estimator",
        "algorithm",
        str,
        "grpo",
        "how rewards become advantages: a name of docs/algorithms.md, or 'package.module:function'",
    ),
    Option(
        "disable_grpo_std_normalization",
        "algorithm",
        bool,
        False,
        "grpo, gdpo, pass_at_k: do not divide by the deviation",
    ),
    Option(
        "advantage_deviation",
        "algorithm",
        str,
        "unbiased",
        "deviation of a group with n - 1 or n",
        choices=("unbiased", "biased"),
    ),
    Option(
        "advantage_epsilon",
        "algorithm",
        float,
        None,
        "added to the deviation (or mean) that is divided by; default: the estimator's own",
        within=above(0),
    ),
    Option(
        "use_leave_one_out_baseline",
        "algorithm",
        bool,
        False,
        "grpo, gdpo: compare a rollout with the others of its group alone",
    ),
    Option(
        "grpo_std_scope",
        "algorithm",
        str,
        "group",
        "grpo, gdpo: whose deviation is divided by",
        choices=("group", "batch"),
    ),
    Option(
        "single_sample_advantage",
        "algorithm",
        str,
        "zero",
        "what a rollout gets that is alone in its group",
        choices=("zero", "reward"),
    ),
    Option(
        "exclude_masked_rollouts",
        "algorithm",
        bool,
        False,
        "rollouts without a loss token do not count in what others are compared with",
    ),
    Option("normalize_advantages", "algorithm", bool, False, "whiten advantages over the batch"),
    Option(
        "estimator_whitening",
        "algorithm",
        bool,
        True,
        "whiten where the estimator's paper does: reinforce_plus_plus(_baseline), gdpo",
    ),
    Option(
        "gamma",
        "algorithm",
        float,
        1.0,
        "discount of later rewards",
        within=at_least(0, 1),
    ),
    Option("lambd", "algorithm", float, 1.0, "lambda of GAE (ppo)", within=at_least(0, 1)),
    Option(
        "discount_masked_tokens",
        "algorithm",
        bool,
        False,
        "discounts decay over tokens outside the loss, too",
    ),
    Option(
        "gdpo_reward_keys",
        "algorithm",
        str,
        None,
        "parts of the reward that gdpo takes, with commas between; default: all",
    ),
    Option(
        "gdpo_reward_weights",
        "algorithm",
        str,
        None,
        "their weights, with commas between; default: 1 each",
    ),
    Option(
        "gdpo_whitening",
        "algorithm",
        str,
        "rollout",
        "what counts as one where gdpo whitens",
        choices=("rollout", "token"),
    ),
    Option(
        "remax_baseline_key",
        "algorithm",
        str,
        "greedy_reward",
        "remax: part of the reward that holds the reward of the prompt's greedy rollout; "
        "'greedy_reward' is made by sampling one more response of each prompt greedily",
    ),
    Option(
        "use_opd",
        "algorithm",
        bool,
        False,
        "on-policy distillation: add the teacher's term to the advantages of any estimator",
    ),
    Option("opd_kl_coef", "algorithm", float, 1.0, "its weight", within=at_least(0)),
)
