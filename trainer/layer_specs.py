"""What depends on a model's architecture when it is built: Megatron's options, layers, positions.

How the model is divided over ranks, its dtypes and its optimizer are elsewhere
(`trainer.model`, `trainer.state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from torch.nn import functional

from trainer.architecture import Architecture
from trainer.megatron import (
    GPTModel,
    LocalSpecProvider,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from trainer.packed_attention import CoreAttention

__all__ = ["block_spec", "config_class", "config_options", "finish_model", "model_options"]


def config_class(architecture: Architecture) -> Callable[..., TransformerConfig]:
    """Which of Megatron's configuration classes the architecture takes."""
    return cast(Callable[..., TransformerConfig], TransformerConfig)


def config_options(architecture: Architecture) -> dict[str, Any]:
    """The fields of Megatron's configuration that the architecture decides, by Megatron's names."""
    options: dict[str, Any] = {
        "num_layers": architecture.num_hidden_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.rms_norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }
    if architecture.num_experts is not None:
        options |= {
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
            "moe_enable_routing_replay": True,
        }
    return options


def model_options(architecture: Architecture) -> dict[str, Any]:
    """The arguments of GPTModel that the architecture decides, by Megatron's names."""
    return {
        # Not padded: without tensor parallelism every row of the embedding is a token.
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": architecture.max_position_embeddings,
        "share_embeddings_and_output_weights": architecture.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": architecture.rope_theta,
    }


def block_spec(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the norm that a last stage ends with.

    `vp_stage` and `pp_rank` as Megatron's own functions take them: None means this rank's only
    stage.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=architecture.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    layers = [layer] * architecture.num_hidden_layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=layers[first : first + count],
        layer_norm=LocalSpecProvider().layer_norm(rms_norm=True),
    )


def finish_model(model: GPTModel) -> None:
    """Set what Megatron's constructors have no argument for. Call it once on a new model."""
    _scale_after_product(model)


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
