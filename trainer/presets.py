"""What other frameworks call by our names but do otherwise: their defaults, and their spellings.

A preset changes the defaults of options, nothing else. What the command line says wins over it, and
what a run records are the values that came of it, so a preset may change without changing a run.
The values were read in the sources of the frameworks (slime and Miles 2026-08, verl 0.9, TRL 1.16,
NeMo-RL 2026-08); each says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.option_values import defaults

__all__ = ["ESTIMATOR_SPELLINGS", "PRESETS", "Default", "preset_values", "spelled_out"]


@dataclass(frozen=True, slots=True)
class Default:
    """One option that a framework has another default for."""

    option: str
    value: Any
    source: str
    """Where it was read: file, and the name there."""
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options, and the values of them with which it applies."""


_GROUPED = {"advantage_estimator": ("grpo", "gdpo")}
_PPO = {"advantage_estimator": ("ppo",)}
_KL_LOSS = {"use_kl_loss": (True,)}
_MIS = {"use_tis": (True,)}

_SLIME = (
    Default("dynamic_sampling_filter_path", "none", "slime/utils/arguments.py: default None"),
    Default("estimator_whitening", False, "slime/utils/arguments.py: normalize_advantages False"),
    Default("discount_masked_tokens", True, "slime/utils/ppo_utils.py: returns over all tokens"),
)

PRESETS: Mapping[str, tuple[Default, ...]] = {
    "slime": _SLIME,
    "miles": _SLIME,
    "verl": (
        Default("dynamic_sampling_filter_path", "none", "ppo_trainer.yaml: no filter_groups"),
        Default("single_sample_advantage", "reward", "core_algos.py: a lone score has mean 0"),
        Default("gdpo_whitening", "token", "core_algos.py: masked_whiten over tokens"),
        Default("normalize_advantages", True, "core_algos.py: GAE is whitened", _PPO),
        Default("value_clip", 0.5, "config/critic/critic.yaml: cliprange_value", _PPO),
        Default(
            "eps_clip_c",
            3.0,
            "config/actor/actor.yaml: clip_ratio_c, which other losses do not look at",
            {"policy_loss": ("ppo_clip", "vanilla", "dppo_tv", "dppo_kl")},
        ),
        Default("loss_aggregation", "token", "config/actor/actor.yaml: loss_agg_mode token-mean"),
        Default(
            "loss_aggregation",
            "seq-mean-token-mean",
            "core_algos.py: compute_policy_loss_gspo, _sapo, _geo_mean: whatever the mode",
            {
                "policy_loss": ("gspo", "sapo", "gmpo", "geo_mean"),
                "calculate_per_token_loss": (False,),
            },
        ),
        Default("kl_loss_coef", 0.001, "config/actor/actor.yaml: kl_loss_coef", _KL_LOSS),
        Default("kl_loss_type", "low_var_kl", "config/actor/actor.yaml: kl_loss_type", _KL_LOSS),
        Default("ppo_kl_coef", 0.1, "config/actor/actor.yaml: policy_loss.ppo_kl_coef"),
    ),
    "trl": (
        Default("dynamic_sampling_filter_path", "none", "grpo_trainer.py: no filter of groups"),
        Default("advantage_epsilon", 1e-4, "grpo_trainer.py: std_rewards + 1e-4", _GROUPED),
        Default("loss_aggregation", "token", "grpo_config.py: loss_type dapo"),
        Default("kl_loss_type", "k3", "grpo_trainer.py: per_token_kl", _KL_LOSS),
        Default("cispo_form", "canonical", "grpo_trainer.py: clamp(coef_1, max=epsilon_high)"),
        Default(
            "use_tis",
            True,
            "grpo_config.py: vllm_importance_sampling_correction",
            {"use_rollout_logprobs": (False,)},
        ),
        Default("custom_tis_function_path", "mis", "grpo_config.py: sequence_mask", _MIS),
        Default("mis_level", "sequence", "grpo_config.py: sequence_mask", _MIS),
        Default("mis_mode", "mask", "grpo_config.py: sequence_mask", _MIS),
        Default("mis_upper_bound", 3.0, "grpo_config.py: vllm_importance_sampling_clip_max", _MIS),
        Default("mis_lower_bound", 0.0, "grpo_config.py: vllm_importance_sampling_clip_min", _MIS),
    ),
    "nemo-rl": (
        Default(
            "dynamic_sampling_filter_path",
            "none",
            "grpo.py: use_dynamic_sampling",
        ),
        Default(
            "use_leave_one_out_baseline",
            True,
            "advantage_estimator.py: use_leave_one_out_baseline",
            _GROUPED,
        ),
        Default("exclude_masked_rollouts", True, "advantage_estimator.py: valid_mask"),
        Default("normalize_advantages", True, "advantage_estimator.py: GAEConfig", _PPO),
        Default("lambd", 0.95, "advantage_estimator.py: gae_lambda", _PPO),
        Default(
            "loss_aggregation", "token", "examples/configs/grpo_math_1B.yaml: token_level_loss"
        ),
        Default(
            "kl_loss_coef",
            0.01,
            "examples/configs/grpo_math_1B.yaml: reference_policy_kl_penalty",
            _KL_LOSS,
        ),
        Default("kl_loss_type", "k3", "algorithms/utils.py: calculate_kl", _KL_LOSS),
    ),
}
"""What each framework does differently, by the name that `--preset` takes. Later ones win."""

ESTIMATOR_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    # slime and Miles file these two losses under the estimator.
    "gspo": {"advantage_estimator": "grpo", "policy_loss": "gspo"},
    "cispo": {"advantage_estimator": "grpo", "policy_loss": "cispo"},
    "gae": {"advantage_estimator": "ppo"},  # verl, OpenRLHF, NeMo-RL
    "grpo_passk": {"advantage_estimator": "pass_at_k"},  # verl
    "reinforce_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},  # OpenRLHF
    "opd": {"advantage_estimator": "on_policy_distillation"},  # NeMo-RL
}
"""Names of estimators elsewhere, and the options that they stand for here."""


def preset_values(
    name: str, explicit: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The defaults that a preset sets beside what is given; nothing that is given is in it.

    Where neither says anything, `recorded` does, and then the option's own default. What another
    preset has set in `recorded` goes back to that default.
    """
    recorded, own = recorded or {}, defaults()
    values: dict[str, Any] = {}
    if recorded.get("preset") not in (None, name):
        values = {
            default.option: own[default.option]
            for default in PRESETS[recorded["preset"]]
            if default.option not in explicit and recorded.get(default.option) == default.value
        }
    known = {**own, **recorded, **explicit}
    for default in PRESETS[name]:
        holds = {**known, **values}
        if default.option not in explicit and all(
            holds[option] in wanted for option, wanted in default.when.items()
        ):
            values[default.option] = default.value
    return values


def spelled_out(
    explicit: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the command line says, by our names and with what its preset adds.

    `recorded` are the settings that hold where nothing is said: those of the branch that is left.
    Raises InvalidArgument where another framework's name stands for one policy loss, and another is
    given beside it.
    """
    said = dict(explicit)
    spelling = ESTIMATOR_SPELLINGS.get(str(said.get("advantage_estimator")), {})
    for option, value in spelling.items():
        if option != "advantage_estimator" and said.get(option, value) != value:
            raise InvalidArgument(
                explain(
                    "reading the options",
                    on=f"--advantage-estimator {said['advantage_estimator']}",
                    expected=f"--{option.replace('_', '-')} {value}, which it stands for, or none",
                    found=said[option],
                    do="give the estimator by its own name, grpo, beside another loss",
                )
            )
    said |= spelling
    if said.get("preset") is None:
        return said
    return preset_values(said["preset"], said, recorded) | said
