"""The options of `ledger-train`: each declared once, with its group, type, default and nature.

A *content* option decides what comes out: it is recorded in `run_started`, and continuing a run
with another value is refused. A *place* option says where, how long or how often (paths, names,
intervals, limits): it may differ between the processes that continue one run.

Names are those of slime and Megatron-LM where they have the option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.ranges import LARGEST, Range, above, at_least

__all__ = ["OPTIONS", "Option", "add_options"]

Group = Literal["ledger", "checkpoint", "rollout", "algorithm", "parallelism", "optimizer"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line."""

    name: str
    """With underscores; the flag has dashes."""
    group: Group
    type: Any
    """int, float, str; bool for a switch; 'json' for a JSON object."""
    default: Any
    help: str
    content: bool = True
    choices: tuple[str, ...] | None = None
    within: Range | None = None
    """Numbers that it takes; None: a text, a switch, or a JSON object."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


_COUNT = at_least(1, LARGEST)
_ANY = Range()


def _place(
    name: str, group: Group, type_: Any, default: Any, text: str, within: Range | None = None
) -> Option:
    return Option(name, group, type_, default, text, content=False, within=within)


OPTIONS: tuple[Option, ...] = (
    _place("ledger", "ledger", str, "ledger-data", "where the ledger is"),
    _place("run_id", "ledger", str, None, "name of the run; needed when the ledger has several"),
    _place("branch", "ledger", str, None, "branch to train on, or name of the one to fork"),
    _place(
        "from_version",
        "ledger",
        int,
        None,
        "fork a branch at this weight version and re-train it; other options default to the run's",
        within=at_least(0, 2**63 - 1),
    ),
    _place(
        "ignore_checkpoint",
        "ledger",
        int,
        None,
        "pass over the checkpoints of this version and later ones, and run the steps again instead",
        within=at_least(0, 2**63 - 1),
    ),
    Option(
        "data",
        "ledger",
        str,
        "fresh",
        "trajectories to train on: 'fresh' rollouts, or those 'recorded' after --from-version "
        "(the default there)",
        choices=("fresh", "recorded"),
    ),
    _place(
        "hf_checkpoint",
        "checkpoint",
        str,
        None,
        "folder of a Hugging Face model to start from (weights, configuration, tokenizer)",
    ),
    _place(
        "save_interval",
        "checkpoint",
        int,
        4,
        "rollout steps between checkpoints; the first and the last version are always saved",
        within=_COUNT,
    ),
    _place("save", "checkpoint", str, None, "folder of checkpoints; default: inside the ledger"),
    Option(
        "engine",
        "rollout",
        str,
        "transformers",
        "rollout engine: 'transformers' (in process) or 'sglang'",
    ),
    Option(
        "task",
        "rollout",
        str,
        "addition",
        "prompts and verifier: 'addition', 'reasoning_gym:<dataset>'",
    ),
    Option("task_options", "rollout", "json", {}, "JSON object given to the task"),
    Option(
        "custom_rm_path",
        "rollout",
        str,
        None,
        "reward function 'package.module:function' in place of the task's own",
    ),
    _place("num_rollout", "rollout", int, 20, "rollout steps in all", within=_COUNT),
    Option(
        "rollout_batch_size", "rollout", int, 8, "prompts (groups) of a rollout step", within=_COUNT
    ),
    Option("n_samples_per_prompt", "rollout", int, 8, "samples of a prompt", within=_COUNT),
    Option(
        "over_sampling_batch_size",
        "rollout",
        int,
        None,
        "prompts asked for when a filter has dropped some; default: as --rollout-batch-size",
        within=_COUNT,
    ),
    Option(
        "dynamic_sampling_filter_path",
        "rollout",
        str,
        "check_reward_nonzero_std",
        "filter of groups: a name, 'none', or 'package.module:function'",
    ),
    Option(
        "rollout_max_rounds",
        "rollout",
        int,
        64,
        "rounds of asking for more prompts at most",
        within=_COUNT,
    ),
    Option(
        "rollout_max_response_len",
        "rollout",
        int,
        16,
        "new tokens of a response at most",
        within=_COUNT,
    ),
    Option("rollout_temperature", "rollout", float, 1.0, "sampling temperature", within=above(0)),
    Option("rollout_top_p", "rollout", float, 1.0, "nucleus mass; 1.0 is off", within=above(0, 1)),
    Option(
        "rollout_top_k",
        "rollout",
        int,
        -1,
        "number of candidates; -1 is off",
        within=at_least(1, LARGEST, off=-1),
    ),
    Option(
        "rollout_seed",
        "rollout",
        int,
        42,
        "root of every random seed of the run",
        within=at_least(0, 2**63 - 1),
    ),
    Option(
        "recompute_logprobs_via_prefill",
        "rollout",
        bool,
        False,
        "take the rollout log-probs from one forward over the finished sequences, in the shape "
        "of the trainer's micro-batches (bit-equal to the trainer's for dense models on one "
        "machine)",
    ),
    _place(
        "eval_interval",
        "rollout",
        int,
        None,
        "rollout steps between evaluations; off if unset",
        within=_COUNT,
    ),
    Option("n_eval_prompts", "rollout", int, 64, "prompts of an evaluation", within=_COUNT),
    Option("advantage_estimator", "algorithm", str, "grpo", "how rewards become advantages"),
    Option("policy_loss", "algorithm", str, "ppo_clip", "how advantages become a loss"),
    Option(
        "disable_grpo_std_normalization",
        "algorithm",
        bool,
        False,
        "do not divide by the group's deviation (Dr. GRPO)",
    ),
    Option("normalize_advantages", "algorithm", bool, False, "whiten advantages over the batch"),
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
    Option("kl_coef", "algorithm", float, 0.0, "KL to the reference in the reward", within=_ANY),
    Option("use_kl_loss", "algorithm", bool, False, "KL to the reference in the loss"),
    Option("kl_loss_coef", "algorithm", float, 0.0, "its weight", within=_ANY),
    Option(
        "kl_loss_type",
        "algorithm",
        str,
        "k1",
        "its estimator",
        choices=("k1", "k2", "k3", "low_var_kl"),
    ),
    Option("entropy_coef", "algorithm", float, 0.0, "weight of the entropy bonus", within=_ANY),
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
    Option(
        "global_batch_size",
        "algorithm",
        int,
        None,
        "samples of an optimizer step; default: what a rollout step makes, divided by "
        "--num-steps-per-rollout",
        within=_COUNT,
    ),
    Option(
        "num_steps_per_rollout",
        "algorithm",
        int,
        1,
        "optimizer steps of a rollout step",
        within=_COUNT,
    ),
    Option(
        "micro_batch_size",
        "algorithm",
        int,
        8,
        "rows of a micro-batch, at most --global-batch-size",
        within=_COUNT,
    ),
    Option(
        "seq_length",
        "algorithm",
        int,
        None,
        "tokens a row; default: the longest sample of the step",
        within=at_least(2, LARGEST),
    ),
    Option(
        "tensor_model_parallel_size", "parallelism", int, 1, "tensor parallel size", within=_COUNT
    ),
    Option(
        "pipeline_model_parallel_size",
        "parallelism",
        int,
        1,
        "pipeline parallel size",
        within=_COUNT,
    ),
    Option("context_parallel_size", "parallelism", int, 1, "context parallel size", within=_COUNT),
    Option(
        "expert_model_parallel_size", "parallelism", int, 1, "expert parallel size", within=_COUNT
    ),
    Option(
        "expert_tensor_parallel_size",
        "parallelism",
        int,
        None,
        "tensor parallel size inside experts",
        within=_COUNT,
    ),
    Option(
        "num_threads",
        "parallelism",
        int,
        1,
        "CPU threads of an operation, pinned and recorded",
        within=at_least(1, 1024),
    ),
    Option(
        "deterministic_mode",
        "parallelism",
        bool,
        True,
        "bitwise repeatable operations; on by default",
    ),
    Option("lr", "optimizer", float, 1e-6, "learning rate", within=at_least(0)),
    Option(
        "min_lr",
        "optimizer",
        float,
        0.0,
        "learning rate at the end of the decay",
        within=at_least(0),
    ),
    Option(
        "lr_decay_style",
        "optimizer",
        str,
        "constant",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    ),
    Option("lr_decay_iters", "optimizer", int, None, "steps of the decay", within=_COUNT),
    Option(
        "lr_warmup_iters", "optimizer", int, 0, "steps of the warm-up", within=at_least(0, LARGEST)
    ),
    Option("weight_decay", "optimizer", float, 0.0, "weight decay", within=at_least(0)),
    Option(
        "adam_beta1",
        "optimizer",
        float,
        0.9,
        "Adam's beta1",
        within=Range(low=0, high=1, without_high=True),
    ),
    Option(
        "adam_beta2",
        "optimizer",
        float,
        0.98,
        "Adam's beta2",
        within=Range(low=0, high=1, without_high=True),
    ),
    Option("adam_eps", "optimizer", float, 1e-8, "Adam's epsilon", within=above(0)),
    Option(
        "clip_grad", "optimizer", float, 1.0, "largest gradient norm; 0 is off", within=at_least(0)
    ),
    Option(
        "use_distributed_optimizer",
        "optimizer",
        bool,
        False,
        "shard the optimizer state over data-parallel ranks",
    ),
)

_TITLES: Mapping[Group, str] = {
    "ledger": "ledger",
    "checkpoint": "checkpoint",
    "rollout": "rollout",
    "algorithm": "algorithm",
    "parallelism": "parallelism",
    "optimizer": "optimizer",
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is expected, found {text}")
    return value


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option] = OPTIONS) -> None:
    """Add the options, grouped. What is not given on the command line is absent from the result."""
    for group, title in _TITLES.items():
        section = parser.add_argument_group(title)
        for option in options:
            if option.group != group:
                continue
            shown = "" if option.default is None else f" (default: {option.default})"
            keywords: dict[str, Any] = {
                "dest": option.name,
                "default": argparse.SUPPRESS,
                "help": (option.help + shown).replace("%", "%%"),
            }
            if option.type is bool:
                keywords["action"] = argparse.BooleanOptionalAction
            elif option.type == "json":
                keywords.update(type=_json_object, metavar="JSON")
            else:
                metavar = {int: "N", float: "X", str: "NAME"}[option.type]
                keywords.update(type=option.type, choices=option.choices)
                if option.choices is None:
                    keywords["metavar"] = metavar
            section.add_argument(option.flag, **keywords)
