"""What depends on a model's architecture when it is built: Megatron's options, layers, positions.

How the model is divided over ranks, its dtypes and its optimizer are elsewhere
(`trainer.model`, `trainer.state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from torch.nn import functional

from trainer.architecture import Architecture, Experts, Latent
from trainer.layer_modules import (
    LatentAttention,
    LatentSelfAttention,
    NormedResidual,
    RMSNorm,
    gather_latent,
)
from trainer.megatron import (
    GPTModel,
    LayerType,
    MLATransformerConfig,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from trainer.packed_attention import CoreAttention
from trainer.rotary import Llama3Scaling, YarnScaling
from trainer.transformer_engine import (
    block_norm,
    check_architecture,
    context_attention,
    engine_layer,
    uses_engine,
)

__all__ = [
    "block_spec",
    "config_class",
    "config_options",
    "finish_model",
    "keep_float32",
    "model_options",
]


def config_class(architecture: Architecture) -> Callable[..., TransformerConfig]:
    """Which of Megatron's configuration classes the architecture takes."""
    if architecture.latent is not None:
        return cast(Callable[..., TransformerConfig], MLATransformerConfig)
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
        "add_qkv_bias": architecture.qkv_bias,
        "rotary_interleaved": architecture.rotary.interleaved,
    }
    if architecture.experts is not None:
        options |= _experts_options(architecture.experts)
    if architecture.latent is not None:
        options |= _latent_options(architecture, architecture.latent)
    return options


def _experts_options(experts: Experts) -> dict[str, Any]:
    options = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_tok,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(has) for has in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared_intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": experts.score_function,
        # Megatron's post-softmax (softmax over the chosen logits) is Hugging Face's
        # norm_topk_prob: softmax over all, then divided by the sum of the chosen. Its
        # pre-softmax is the same without the division. Sigmoids are divided in any case.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_topk_scaling_factor": None if experts.scaling == 1 else experts.scaling,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.group_topk,
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": True,
    }
    if experts.correction_bias:
        options |= {
            "moe_router_enable_expert_bias": True,
            # Megatron moves the bias after every step, by its load-balancing rule, unless the rate
            # is 0: then it stays as it was loaded, as the engine has it.
            "moe_router_bias_update_rate": 0.0,
        }
    return options


def _latent_options(architecture: Architecture, latent: Latent) -> dict[str, Any]:
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        # Megatron's local attention takes the width of its output from it.
        "kv_channels": latent.v_head_dim,
        # The norms of the latent vectors.
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": architecture.rotary.theta,
        "rotary_percent": 1.0,
        # Without YaRN they must not change the scale of the scores.
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    scaling = architecture.rotary.scaling
    if isinstance(scaling, YarnScaling):
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return options


def model_options(architecture: Architecture) -> dict[str, Any]:
    """The arguments of GPTModel that the architecture decides, by Megatron's names."""
    options: dict[str, Any] = {
        # Not padded: without tensor parallelism every row of the embedding is a token.
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": architecture.max_position_embeddings,
        "share_embeddings_and_output_weights": architecture.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": architecture.rotary.theta,
        "rotary_percent": architecture.rotary.fraction,
    }
    if isinstance(architecture.rotary.scaling, Llama3Scaling):
        options |= {
            "rope_scaling": True,
            "rope_scaling_factor": architecture.rotary.scaling.factor,
        }
    return options


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

    Raises InvalidArgument where TransformerEngine's modules are asked for, and the architecture
    has none of them, or they are not installed.
    """
    check_architecture(architecture, config)
    dense = _layer_spec(architecture, config, None)
    if architecture.experts is None:
        layers = [dense] * architecture.num_hidden_layers
    else:
        routed = _layer_spec(architecture, config, architecture.experts.num_experts)
        layers = [routed if has else dense for has in architecture.experts.layers]
    return TransformerBlockSubmodules(
        layer_specs=[layers[n] for n in _layers_here(config, vp_stage, pp_rank)],
        layer_norm=block_norm() if uses_engine(config) else RMSNorm,
    )


def _layers_here(
    config: TransformerConfig, vp_stage: int | None, pp_rank: int | None
) -> list[int] | range:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(
            layout.get_layer_id_list(
                layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
            )
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))


def _layer_spec(
    architecture: Architecture, config: TransformerConfig, num_experts: int | None
) -> ModuleSpec:
    if uses_engine(config):
        return _with_norms_after(architecture, config, engine_layer(architecture, num_experts))
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
        multi_latent_attention=architecture.latent is not None,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = (
        context_attention() if config.context_parallel_size > 1 else CoreAttention
    )
    if architecture.latent is not None:
        parts.self_attention.module = LatentSelfAttention
        attention.core_attention = LatentAttention
        eps = architecture.latent.norm_eps
        norm = ModuleSpec(RMSNorm, params={"own_eps": eps})
        attention.kv_layernorm = norm
        if architecture.latent.q_lora_rank is not None:
            attention.q_layernorm = norm
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return _with_norms_after(architecture, config, layer)


def _with_norms_after(
    architecture: Architecture, config: TransformerConfig, layer: ModuleSpec
) -> ModuleSpec:
    """The layer, with GLM-4's norms of what attention and feed-forward give, if it has them."""
    if architecture.sandwich_norms:
        parts = layer.submodules
        parts.self_attn_bda = ModuleSpec(NormedResidual, params={"config": config})
        parts.mlp_bda = ModuleSpec(NormedResidual, params={"config": config})
    return layer


def finish_model(model: GPTModel) -> None:
    """Set what Megatron's constructors have no argument for. Call it once on a new model."""
    if model.config.multi_latent_attention:
        for layer in model.decoder.layers:
            layer.self_attention.linear_kv_down_proj.register_forward_hook(gather_latent)
    _scale_after_product(model)


def keep_float32(model: GPTModel) -> None:
    """After a model was cast to 16 bits: the bias by which a router chooses is float32 again.

    Call it before weights are loaded. (Megatron's router does it in its first forward.)
    """
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router._maintain_float32_expert_bias()


def _scale_after_product(model: GPTModel) -> None:
    """Scale attention scores after the product of queries and keys instead of inside it.

    Megatron's local attention hands 1/√head_dim to the matrix product, Hugging Face's eager
    attention multiplies its result. The two round alike only where the factor is a power of two
    (head_dim 16, 64, 256); elsewhere the factor moves to Megatron's softmax, which has a place
    for it.
    """
    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        if not isinstance(attention, CoreAttention):
            continue  # TransformerEngine's kernels have an order of their own
        if math.frexp(attention.softmax_scale)[0] != 0.5:
            attention.scale_mask_softmax.scale = attention.softmax_scale
            attention.softmax_scale = 1.0
