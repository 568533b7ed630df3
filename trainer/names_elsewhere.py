"""What an option is called here that another framework has under another name.

`docs/algorithms.md` has the same for algorithms as tables. slime's and Miles's own names are
options here wherever the option exists; this says what stands for the rest of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from ledger.errors import InvalidArgument, explain

__all__ = ["ELSEWHERE", "unknown_options"]

_ALWAYS = "leave it out: each step measures and records it"
_KEPT = "leave it out: the ledger keeps every sample, and `ledger show` and `ledger sql` read it"
_ROUTER = "leave it out: sessions are dealt to engines here; --rollout-engine-urls attaches some"
_EMBEDDED = "leave it out: the engine is in the trainer's process"
_TASK = "--task (and --task-options) says where prompts and rewards come from"
_ENGINE = "--engine sglang; 'transformers', the default, is in the trainer's process"
_EPISODES = "--environment, and --environment-options"
_STALENESS = "--max-weight-staleness, which counts weight versions"
_TRACKING = "--use-tensorboard, --use-wandb"
_MIS_FORM = "--use-tis --custom-tis-function-path mis, with --mis-level and --mis-mode"

ELSEWHERE: Mapping[str, str] = {
    # slime and Miles
    "load": "leave it out: the same command goes on with what is in --ledger",
    "get_mismatch_metrics": _ALWAYS,
    "use_rollout_entropy": _ALWAYS,
    "log_passrate": _ALWAYS,
    "disable_rewards_normalization": "--advantage-estimator reinforce",
    "loss_type": "--policy-loss, and TRL's also --loss-aggregation",
    "custom_loss_function_path": "--policy-loss package.module:function",
    "log_probs_max_tokens_per_gpu": "--max-tokens-per-gpu",
    "num_epoch": "--num-rollout",
    "eval_config": "--eval-prompt-data and the --eval-… options",
    "skip_eval_before_train": "leave it out: the first version is the point to compare with",
    "rollout_function_path": "--custom-generate-function-path drives a sample; batches, filters "
    "and what was cut are kept by the ledger",
    "eval_function_path": "--eval-prompt-data, judged by --custom-rm-path",
    "data_source_path": "--prompt-data, or --task",
    "buffer_filter_path": "leave it out: what was cut goes on first, the oldest before the others; "
    "--max-weight-staleness bounds its age",
    "rollout_sample_filter_path": "--dynamic-sampling-filter-path, which drops whole groups",
    "rollout_all_samples_process_path": _KEPT,
    "custom_reward_post_process_path": "--advantage-estimator package.module:function",
    "custom_convert_samples_to_train_data_path": "leave it out: a batch is read from the ledger",
    "custom_rollout_log_function_path": _KEPT,
    "custom_eval_rollout_log_function_path": _KEPT,
    "disable_rollout_global_dataset": "leave --prompt-data out",
    "multimodal_keys": "nothing: prompts are texts",
    "custom_config_path": "leave it out: custom functions see the options of the run, and the "
    "metadata of a row",
    "rollout_external": "--rollout-engine-urls",
    "rollout_external_engine_addrs": "--rollout-engine-urls",
    "offload": "--offload-rollout",
    "colocate": "--offload-rollout, with --engine sglang on the trainer's GPUs",
    "prefill_num_servers": "leave it out: start prefill and decode servers with their front, and "
    "name it in --rollout-engine-urls",
    "use_slime_router": _ROUTER,
    "use_fault_tolerance": "leave it out: engines are looked after; --rollout-engine-restarts 0 "
    "gives a dead one up",
    "rollout_health_check_first_wait": "--rollout-engine-ready-timeout",
    "save_debug_rollout_data": _KEPT,
    "debug_train_only": "--rollout-by elsewhere, or --from-version K --data recorded",
    "debug_rollout_only": "ledger-rollout --rollout-only",
    "load_debug_rollout_data": "--from-version K --data recorded",
    "dump_details": _KEPT,
    "wandb_key": "WANDB_API_KEY in the environment: a command line is seen by others",
    "seed": "--rollout-seed, the root of every seed",
    "tb_project_name": "--tensorboard-dir",
    "tb_experiment_name": "--tensorboard-dir",
    "tis_level": "--mis-level",
    "tis_mode": "--mis-mode",
    "tis_upper_bound": "--mis-upper-bound",
    "tis_lower_bound": "--mis-lower-bound",
    "tis_batch_normalize": "--mis-batch-normalize",
    "rs_veto_threshold": "--mis-veto-threshold",
    "use_rs": _MIS_FORM,
    "rs_level": _MIS_FORM,
    # verl
    "adv_estimator": "--advantage-estimator",
    "norm_adv_by_std_in_grpo": "--disable-grpo-std-normalization for its False",
    "use_kl_in_reward": "--kl-coef",
    "lam": "--lambd",
    "loss_mode": "--policy-loss",
    "loss_agg_mode": "--loss-aggregation",
    "clip_ratio": "--eps-clip",
    "clip_ratio_low": "--eps-clip",
    "clip_ratio_high": "--eps-clip-high",
    "clip_ratio_c": "--eps-clip-c",
    "entropy_coeff": "--entropy-coef",
    "cliprange_value": "--value-clip",
    "rollout_is": "--use-tis",
    "rollout_is_threshold": "--tis-clip",
    "rollout_rs": _MIS_FORM,
    "bypass_mode": "--use-rollout-logprobs",
    "train_batch_size": "--rollout-batch-size",
    "ppo_mini_batch_size": "--global-batch-size, which counts samples",
    "ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    "use_dynamic_bsz": "--use-dynamic-batch-size",
    "ppo_max_token_len_per_gpu": "--max-tokens-per-gpu",
    "train_files": "--prompt-data",
    "val_files": "--eval-prompt-data NAME PATH",
    "test_freq": "--eval-interval",
    "custom_reward_function": "--custom-rm-path",
    "prompt_key": "--input-key",
    "max_prompt_length": "--rollout-max-prompt-len",
    "filter_overlong_prompts": "--rollout-max-prompt-len, which leaves longer ones out",
    "shuffle": "--rollout-shuffle",
    "max_response_length": "--rollout-max-response-len",
    "total_training_steps": "--num-rollout",
    "total_epochs": "--num-rollout",
    "model.path": "--hf-checkpoint",
    "rollout.n": "--n-samples-per-prompt",
    "rollout.name": "--engine",
    "rollout.mode": "leave it out: an engine in a process of its own is always asked so",
    "rollout.tensor_model_parallel_size": "--rollout-num-gpus-per-engine",
    "gpu_memory_utilization": "--sglang-mem-fraction-static",
    "top_k": "--rollout-top-k",
    "val_kwargs.n": "--n-samples-per-eval-prompt",
    "val_kwargs.temperature": "--eval-temperature",
    "val_kwargs.top_p": "--eval-top-p",
    "val_kwargs.top_k": "--eval-top-k",
    "multi_turn.enable": _EPISODES,
    "multi_turn.format": "the option parser of --environment-options",
    "tool_config_path": _EPISODES,
    "max_assistant_turns": "--max-turns",
    "agent.num_workers": "workers in the file of --layout",
    "reward_manager": "--rm-type or --custom-rm-path",
    "reward_fn_key": "--rm-type or --custom-rm-path, which sees the metadata of a row",
    "return_raw_chat": "--apply-chat-template",
    "filter_groups.enable": "--dynamic-sampling-filter-path",
    "staleness_threshold": f"{_STALENESS}, not a share of samples",
    "trigger_parameter_sync_step": "--update-weights-interval",
    "nnodes": "--actor-num-nodes",
    "n_gpus_per_node": "--actor-num-gpus-per-node",
    "save_freq": "--save-interval",
    "default_local_dir": "--save",
    "logger": _TRACKING,
    # AReaL
    "max_head_offpolicyness": _STALENESS,
    "max_concurrent_rollouts": "--async-max-concurrent-samples, which counts samples",
    # TRL
    "epsilon": "--eps-clip",
    "epsilon_high": "--eps-clip-high",
    "beta": "--use-kl-loss --kl-loss-coef",
    "delta": "--eps-clip-c",
    "scale_rewards": "--disable-grpo-std-normalization for none, --grpo-std-scope for batch",
    "importance_sampling_level": "--policy-loss gspo for sequence",
    "num_generations": "--n-samples-per-prompt",
    "num_iterations": "--num-steps-per-rollout",
    "max_completion_length": "--rollout-max-response-len",
    "dataset_name": "--prompt-data",
    "reward_funcs": "--rm-type or --custom-rm-path",
    "eval_strategy": "--eval-interval",
    "shuffle_dataset": "--rollout-shuffle",
    "model_name_or_path": "--hf-checkpoint",
    "max_steps": "--num-rollout, and --num-steps-per-rollout steps in each",
    "num_train_epochs": "--num-rollout",
    "per_device_train_batch_size": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size, which counts samples",
    "steps_per_generation": "--num-steps-per-rollout",
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_server_base_url": "--engine sglang --rollout-engine-urls",
    "tools": _EPISODES,
    "environment_factory": _EPISODES,
    "max_tool_calling_iterations": "--max-turns",
    "max_staleness": _STALENESS,
    "max_inflight_tasks": "--async-max-concurrent-samples",
    "weight_sync_steps": "--update-weights-interval",
    "output_dir": "--ledger, and --save for checkpoints",
    "save_steps": "--save-interval",
    "report_to": _TRACKING,
    "chat_template_kwargs": "--apply-chat-template-kwargs",
    "learning_rate": "--lr",
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    # NeMo-RL
    "num_prompts_per_step": "--rollout-batch-size",
    "max_input_seq_length": "--rollout-max-prompt-len",
    "num_generations_per_prompt": "--n-samples-per-prompt",
    "ratio_clip_min": "--eps-clip",
    "ratio_clip_max": "--eps-clip-high",
    "ratio_clip_c": "--eps-clip-c",
    "reference_policy_kl_penalty": "--use-kl-loss --kl-loss-coef",
    "token_level_loss": "--loss-aggregation token",
    "async_grpo.enabled": "--fully-async",
    "max_trajectory_age_steps": _STALENESS,
    "use_dynamic_sampling": "--dynamic-sampling-filter-path",
    "max_rollout_turns": "--max-turns",
}
"""Name elsewhere, with underscores → what to do.

Of a dotted name (verl, NeMo-RL) the longest ending that is here counts: `val_kwargs.n` is not
`rollout.n`.
"""


def unknown_options(
    words: Sequence[str], known: Collection[str], *, command: str = "ledger-train"
) -> InvalidArgument:
    """The refusal of the words of a command line that are no options and no values of any.

    `known` are the flags that there are.
    """
    megatron = "; Megatron-Core's: --help-megatron" if command == "ledger-train" else ""
    flags = [word for word in words if word.startswith("--") or "=" in word] or list(words)
    # Never the values: one may be a key.
    names = [flag.partition("=")[0] for flag in flags]
    told = [f"{name}: {_advice(name, known)}" for name in names]
    return InvalidArgument(
        explain(
            "reading the command line",
            expected=f"options of {command} (--help{megatron})",
            found=", ".join(names),
            do="; ".join(told),
        )
    )


def _advice(flag: str, known: Collection[str]) -> str:
    parts = flag.lstrip("-+").replace("-", "_").split(".")
    for first in range(len(parts)):
        if told := ELSEWHERE.get(".".join(parts[first:])):
            return told
    ours = "--" + parts[-1].replace("_", "-")
    if ours in known:
        return ours
    close = get_close_matches(ours, known, n=3, cutoff=0.75)
    return f"perhaps {' or '.join(close)}" if close else "no option here stands for it"
