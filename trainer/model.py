"""Builds Megatron-Core's GPTModel from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn import functional

from trainer.architecture import Architecture, read_architecture, read_config
from trainer.forward import recorded_routing, token_log_probs
from trainer.megatron import (
    GPTModel,
    RouterReplay,
    TransformerConfig,
    get_gpt_layer_local_spec,
    unwrap,
)
from trainer.parallel import device
from trainer.settings import ParallelSettings

__all__ = [
    "architecture_of",
    "build_model",
    "read_config",
    "recorded_routing",
    "token_log_probs",
    "unwrap",
]


def build_model(
    hf_config: Mapping[str, Any], parallel: ParallelSettings, *, trainable: bool
) -> GPTModel:
    """A GPTModel in float32 whose parameters are *not initialised*: load weights into it.

    `trainable=False` gives a frozen model (a reference): no parameter requires a gradient, and it
    is in evaluation mode. The process groups must have been started
    (`trainer.parallel.initialize`).

    Raises InvalidArgument for an architecture or a feature that cannot be built.
    """
    architecture = read_architecture(hf_config)
    config = transformer_config(architecture, parallel)
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )
    others = list(RouterReplay.global_router_replay_instances)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        # Not padded: without tensor parallelism every row of the embedding is a token.
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=True,
        post_process=True,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
    # Megatron's list of routers is global to the process. We address the routers of one model
    # through the model, and leave the list without them, so that nobody drives two models by
    # accident.
    RouterReplay.global_router_replay_instances[:] = others
    model.trajectory_architecture = architecture
    _scale_after_product(model)
    model.to(device())
    if not trainable:
        model.requires_grad_(False)
        model.eval()
    return model


def transformer_config(architecture: Architecture, parallel: ParallelSettings) -> TransformerConfig:
    """Megatron's configuration of an architecture: float32, no dropout, every fusion off.

    With the fusions off, the local layers compute in the order of the Hugging Face code, so that
    logits of dense models are bitwise those of its eager attention on a CPU.
    """
    experts: dict[str, Any] = {}
    if architecture.num_experts is not None:
        experts = {
            "num_moe_experts": architecture.num_experts,
            "moe_router_topk": architecture.num_experts_per_tok,
            "moe_ffn_hidden_size": architecture.moe_intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # Megatron's post-softmax (softmax over the chosen logits) is Hugging Face's
            # norm_topk_prob: softmax over all, then divided by the sum of the chosen. Its
            # pre-softmax is the same without the division.
            "moe_router_pre_softmax": not architecture.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_enable_routing_replay": True,
        }
    expert_tensor_parallel_size = parallel.expert_tensor_parallel_size
    if expert_tensor_parallel_size is None:
        expert_tensor_parallel_size = parallel.tensor_model_parallel_size
    options = dict(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        # The same number as the process groups get: where they differ, Megatron leaves expert
        # gradients unreduced without a word.
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        **experts,
    )
    return TransformerConfig(**options)


def _scale_after_product(model: GPTModel) -> None:
    """Scale attention scores after the product of queries and keys instead of inside it.

    Megatron's local attention hands 1/√head_dim to the matrix product, Hugging Face's eager
    attention multiplies its result. The two round alike only where the factor is a power of two
    (head_dim 16, 64, 256); elsewhere the factor moves to Megatron's softmax, which has a place
    for it.
    """
    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        if math.frexp(attention.softmax_scale)[0] != 0.5:
            attention.scale_mask_softmax.scale = attention.softmax_scale
            attention.softmax_scale = 1.0


def architecture_of(model: Any) -> Architecture:
    """The architecture that `build_model` made the model from."""
    return cast(Architecture, unwrap(model).trajectory_architecture)
