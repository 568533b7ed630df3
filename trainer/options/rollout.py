"""Options of the rollout side."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import LARGEST, above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
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
    place("num_rollout", "rollout", int, 20, "rollout steps in all", within=COUNT),
    Option(
        "rollout_batch_size", "rollout", int, 8, "prompts (groups) of a rollout step", within=COUNT
    ),
    Option("n_samples_per_prompt", "rollout", int, 8, "samples of a prompt", within=COUNT),
    Option(
        "over_sampling_batch_size",
        "rollout",
        int,
        None,
        "prompts asked for at a time, first of all and when a filter has dropped some; default: as "
        "--rollout-batch-size",
        within=COUNT,
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
        within=COUNT,
    ),
    Option(
        "rollout_max_response_len",
        "rollout",
        int,
        16,
        "new tokens of a response at most",
        within=COUNT,
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
        "rollout_logprob_mode",
        "rollout",
        str,
        "full",
        "rollout log-probs of the whole vocabulary ('full'), or of what top-p and top-k left "
        "('processed': the ids they left are recorded, and the trainer renormalises over them)",
        choices=("full", "processed"),
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
    place(
        "eval_interval",
        "rollout",
        int,
        None,
        "rollout steps between evaluations; off if unset",
        within=COUNT,
    ),
    Option("n_eval_prompts", "rollout", int, 64, "prompts of an evaluation", within=COUNT),
    Option(
        "update_weights_interval",
        "rollout",
        int,
        1,
        "rollout steps between two times that the engine gets the weights",
        within=COUNT,
    ),
)
