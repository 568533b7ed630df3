"""What is not passed on to Megatron: its fields that this package sets itself, and why."""

from __future__ import annotations

__all__ = ["AS_IT_IS", "BY_THE_MODEL", "FIXED", "ON_GPU_ONLY"]

BY_THE_MODEL = frozenset(
    {
        "activation_func",
        "activation_func_clamp_value",
        "add_bias_linear",
        "add_qkv_bias",
        "attention_output_gate",
        "experimental_attention_variant",
        "ffn_hidden_size",
        "gated_linear_unit",
        "glu_linear_offset",
        "hidden_size",
        "is_hybrid_model",
        "kv_channels",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "linear_attention_freq",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "mtp_num_layers",
        "multi_latent_attention",
        "no_rope_freq",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "qk_layernorm",
        "rotary_interleaved",
        "softmax_scale",
        "softmax_type",
        "window_size",
    }
)
"""Fields that a Hugging Face configuration decides (`trainer.layer_specs`)."""

_PRECISION = "weights are float32, or bfloat16 with --bf16"
_SCHEDULE = "--pipeline-model-parallel-size and --num-virtual-stages-per-pipeline-rank decide it"
_WITHOUT_INITIALISATION = "weights come from --hf-checkpoint or a checkpoint, none are drawn"
_DROPOUT = "log-probs are those of the policy that samples, which drops nothing"

_CONTEXT = "--context-parallel-size divides every sequence over one group of ranks"

FIXED = {
    "attention_dropout": _DROPOUT,
    "autocast_dtype": _PRECISION,
    "average_in_collective": "--calculate-per-token-loss and weights of tokens do all averaging",
    "batch_p2p_comm": _SCHEDULE,
    "embedding_init_method": _WITHOUT_INITIALISATION,
    "embedding_init_method_std": _WITHOUT_INITIALISATION,
    "enable_autocast": _PRECISION,
    "fp16": _PRECISION,
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32 decides it",
    "hidden_dropout": _DROPOUT,
    "hierarchical_context_parallel_sizes": _CONTEXT,
    "hybrid_context_parallel": _CONTEXT,
    "init_method": _WITHOUT_INITIALISATION,
    "init_method_std": _WITHOUT_INITIALISATION,
    "inference_rng_tracker": "a rank's random state is part of the recorded state",
    "max_seqlen_per_dp_cp_rank": _CONTEXT,
    "moe_enable_routing_replay": "--use-routing-replay and --use-rollout-routing-replay decide it",
    "optimizer": "the recorded state is Adam's",
    "output_layer_init_method": _WITHOUT_INITIALISATION,
    "overlap_p2p_comm": _SCHEDULE,
    "params_dtype": _PRECISION,
    "perform_initialization": _WITHOUT_INITIALISATION,
    "pipeline_dtype": _PRECISION,
    "use_cpu_initialization": _WITHOUT_INITIALISATION,
    "use_megatron_fsdp": "records are taken from Megatron's own gradient buffers",
    "use_precision_aware_optimizer": "the recorded state is float32 main weights and moments",
    "variable_seq_lengths": "the micro-batches of a step decide it",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank is it",
}
"""Name → why a value on the command line would not be obeyed."""

AS_IT_IS: dict[str, float | str] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "optimizer": "adam",
}
"""Of these the value that is in force anyway, which may be said."""

_KERNEL = "it is a CUDA kernel"
_STREAMS = "it overlaps work on CUDA streams"

ON_GPU_ONLY = {
    "apply_rope_fusion": _KERNEL,
    "bias_activation_fusion": "it compiles a kernel, and rounds otherwise",
    "bias_dropout_fusion": "it compiles a kernel, and rounds otherwise",
    "cpu_offloading": "it moves activations from a GPU",
    "cross_entropy_loss_fusion": _KERNEL,
    "cuda_graph_impl": "it captures CUDA graphs",
    "defer_embedding_wgrad_compute": _STREAMS,
    "enable_cuda_graph": "it captures CUDA graphs",
    "external_cuda_graph": "it captures CUDA graphs",
    "fp4": _KERNEL,
    "fp8": _KERNEL,
    "fp8_param_gather": _KERNEL,
    "gradient_accumulation_fusion": _KERNEL,
    "masked_softmax_fusion": _KERNEL,
    "moe_grouped_gemm": _KERNEL,
    "moe_permute_fusion": _KERNEL,
    "moe_router_fusion": _KERNEL,
    "nccl_ub": "it registers buffers with NCCL",
    "optimizer_cpu_offload": "it moves the optimizer's state from a GPU",
    "overlap_grad_reduce": _STREAMS,
    "overlap_moe_expert_parallel_comm": _STREAMS,
    "overlap_param_gather": _STREAMS,
    "overlap_param_gather_with_optimizer_step": _STREAMS,
    "persist_layer_norm": _KERNEL,
    "tp_comm_overlap": _STREAMS,
    "use_te_rng_tracker": "it needs TransformerEngine",
}
"""Name → why it cannot work without CUDA. Off, and not refused, where it is given as off."""
