"""What the settings of advantages, losses and corrections must fulfil."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from trainer.algorithms.correction_names import correction_name

if TYPE_CHECKING:
    from trainer.settings import AlgorithmSettings

__all__ = ["AGGREGATIONS", "WITH_CONSTANT", "Condition", "loss_conditions", "routing_conditions"]

AGGREGATIONS = (
    "rollout",
    "token",
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "luspo",
)
"""What `--loss-aggregation` takes; `trainer.algorithms.aggregate` says what each is."""

WITH_CONSTANT = ("seq-mean-token-sum-norm", "dr_grpo")
"""Those that divide by `loss_scale_factor`."""


class Condition(NamedTuple):
    """One thing that must hold."""

    setting: str
    expected: str
    found: object
    right: bool


def advantage_conditions(s: AlgorithmSettings) -> Iterator[Condition]:
    """Those of the advantage estimators."""
    for setting, value, known in (
        ("--advantage-deviation", s.advantage_deviation, ("unbiased", "biased")),
        ("--grpo-std-scope", s.grpo_std_scope, ("group", "batch")),
        ("--single-sample-advantage", s.single_sample_advantage, ("zero", "reward")),
        ("--gdpo-whitening", s.gdpo_whitening, ("rollout", "token")),
    ):
        yield Condition(setting, f"one of {', '.join(known)}", value, value in known)
    epsilon, keys, weights = s.advantage_epsilon, s.gdpo_reward_keys, s.gdpo_reward_weights
    yield Condition("--advantage-epsilon", "above 0", epsilon, epsilon is None or epsilon > 0)
    yield Condition("--gamma", "within [0, 1]", s.gamma, 0 <= s.gamma <= 1)
    yield Condition("--lambd", "within [0, 1]", s.lambd, 0 <= s.lambd <= 1)
    yield Condition("--gdpo-reward-keys", "each once", keys, len(set(keys)) == len(keys))
    yield Condition(
        "--gdpo-reward-weights",
        "as many as --gdpo-reward-keys, or none",
        weights,
        not weights or len(weights) == len(keys),
    )


def loss_conditions(s: AlgorithmSettings) -> Iterator[Condition]:
    """All of them, in the order in which they are reported."""
    yield from _losses(s)
    yield from _aggregation(s)
    yield from _corrections(s)


def _losses(s: AlgorithmSettings) -> Iterator[Condition]:
    yield Condition(
        "--cispo-form", "slime or canonical", s.cispo_form, s.cispo_form in ("slime", "canonical")
    )
    for name in ("tau_pos", "tau_neg"):
        yield _number(s, name, "above 0", getattr(s, name) > 0)
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        yield _number(s, name, "above 0 and at most 1", 0 < getattr(s, name) <= 1)
    yield Condition(
        "--clip-cov-lb with --clip-cov-ub",
        "a lower bound below the upper one",
        f"{s.clip_cov_lb} and {s.clip_cov_ub}",
        s.clip_cov_lb < s.clip_cov_ub,
    )
    for name in ("vespo_k_pos", "vespo_k_neg"):
        yield _number(s, name, "at least 0", getattr(s, name) >= 0)
    for name in ("vespo_lambda_pos", "vespo_lambda_neg"):
        yield _number(s, name, "above 0", getattr(s, name) > 0)
    yield Condition(
        "--use-unbiased-kl",
        "--use-kl-loss: it is about the KL in the loss",
        "no --use-kl-loss",
        s.use_kl_loss or not s.use_unbiased_kl,
    )


def _aggregation(s: AlgorithmSettings) -> Iterator[Condition]:
    yield Condition(
        "--loss-aggregation",
        f"one of {', '.join(AGGREGATIONS)}",
        s.loss_aggregation,
        s.loss_aggregation in AGGREGATIONS,
    )
    yield Condition(
        "--calculate-per-token-loss with --loss-aggregation",
        "one of them: --calculate-per-token-loss is --loss-aggregation token",
        s.loss_aggregation,
        not s.calculate_per_token_loss or s.loss_aggregation in ("rollout", "token"),
    )
    needed = s.loss_aggregation in WITH_CONSTANT
    yield Condition(
        "--loss-scale-factor",
        f"a number above 0 with --loss-aggregation {s.loss_aggregation}"
        if needed
        else f"nothing: --loss-aggregation {s.loss_aggregation} divides by no constant",
        s.loss_scale_factor,
        s.loss_scale_factor is not None
        and s.loss_scale_factor > 0
        and isfinite(s.loss_scale_factor)
        if needed
        else s.loss_scale_factor is None,
    )


def _corrections(s: AlgorithmSettings) -> Iterator[Condition]:
    yield Condition(
        "--use-tis with --use-rollout-logprobs",
        "one of them: TIS corrects from the policy that sampled to the old policy, and with "
        "--use-rollout-logprobs these are the same",
        "both",
        not (s.use_tis and s.use_rollout_logprobs),
    )
    yield Condition(
        "--custom-tis-function-path",
        "--use-tis: it says which correction",
        f"{s.custom_tis_function_path} without --use-tis",
        s.custom_tis_function_path is None or s.use_tis,
    )
    yield Condition(
        "--tis-clip-low with --tis-clip",
        "0 or more, and at most --tis-clip",
        f"{s.tis_clip_low} and {s.tis_clip}",
        0 <= s.tis_clip_low <= s.tis_clip and isfinite(s.tis_clip),
    )
    for name, known in (
        ("mis_level", ("token", "sequence", "geometric")),
        ("mis_mode", ("truncate", "clip", "mask")),
    ):
        value = getattr(s, name)
        yield Condition(_flag(name), f"one of {', '.join(known)}", value, value in known)
    lower = 1 / s.mis_upper_bound if s.mis_lower_bound is None else s.mis_lower_bound
    yield Condition(
        "--mis-lower-bound with --mis-upper-bound",
        "0 or more, and below --mis-upper-bound (unset: 1 / --mis-upper-bound)",
        f"{lower} and {s.mis_upper_bound}",
        0 <= lower < s.mis_upper_bound and isfinite(s.mis_upper_bound),
    )
    veto = s.mis_veto_threshold
    yield _number(s, "mis_veto_threshold", "above 0 and below 1", veto is None or 0 < veto < 1)
    chosen = s.use_tis and correction_name(s.custom_tis_function_path) == "mis"
    for name, default in (
        ("mis_level", "token"),
        ("mis_mode", "truncate"),
        ("mis_upper_bound", 2.0),
        ("mis_lower_bound", None),
        ("mis_veto_threshold", None),
        ("mis_batch_normalize", False),
    ):
        yield Condition(
            _flag(name),
            "--use-tis --custom-tis-function-path mis, without which it does nothing",
            getattr(s, name),
            chosen or getattr(s, name) == default,
        )
    yield _number(s, "opsm_delta", "at least 0", s.opsm_delta >= 0 and isfinite(s.opsm_delta))


def _number(s: AlgorithmSettings, name: str, expected: str, right: bool) -> Condition:
    return Condition(_flag(name), expected, getattr(s, name), right)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def routing_conditions(s: AlgorithmSettings) -> Iterator[Condition]:
    """Those of routing replay."""
    yield Condition(
        "--use-routing-replay with --use-rollout-routing-replay (routing_replay)",
        "rollout, old_policy or free",
        s.routing_replay,
        s.routing_replay in ("rollout", "old_policy", "free"),
    )
    yield Condition(
        "--replay-routing-weights",
        "replayed experts, whose gate weights they are",
        f"{s.routing_replay} routing",
        s.routing_replay != "free" or not s.replay_routing_weights,
    )
