"""What a Hugging Face config.json says about a model, checked, in the terms that Megatron needs.

Where a key is absent, the default is that of the configuration class of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.hf_config import boolean, integer, number, read_config, require, unsupported
from trainer.rotary import Rotary, read_rotary

__all__ = ["SUPPORTED", "Architecture", "Experts", "Latent", "read_architecture", "read_config"]

SUPPORTED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)
"""Architectures that can be built, by their Hugging Face names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a mixture-of-experts model, and those that every token takes."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Width of one expert."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others are dense."""
    score_function: str
    """Of a router's logits: softmax, or sigmoid."""
    normalised: bool
    """Gate weights sum to `scaling` over the chosen experts."""
    scaling: float = 1.0
    """Factor on the gate weights."""
    correction_bias: bool = False
    """A bias for each expert that decides the choice and is not in the gate weights."""
    groups: int | None = None
    """The experts are in this many groups, and a token takes from `group_topk` of them.
    None: a token takes any."""
    group_topk: int | None = None
    shared_intermediate_size: int | None = None
    """Width of the expert that every token takes. None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
    """None: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """Of the norms of the latent vectors, which transformers leaves at its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, and the parts named here."""

    name: str
    """One of SUPPORTED."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense feed-forward layer."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of a head of queries and keys."""
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rotary: Rotary
    qk_norm: bool = False
    """RMSNorm of each query and key head."""
    qkv_bias: bool = False
    """A bias in the projections of queries, keys and values."""
    sandwich_norms: bool = False
    """RMSNorm of what attention and feed-forward add to the residual, too."""
    fused_gate_up: bool = False
    """Hugging Face keeps the gate and up projections of a dense layer in one tensor."""
    experts: Experts | None = None
    """None: dense."""
    latent: Latent | None = None
    """None: grouped-query attention."""
    prediction_layers: int = 0
    """Multi-token prediction layers in the files, after the last layer. They are not built."""

    @property
    def num_experts(self) -> int | None:
        """Routed experts of a layer that has some; None: dense."""
        return None if self.experts is None else self.experts.num_experts


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Translate and check a configuration.

    Raises InvalidArgument, naming the key, for an architecture or a feature that cannot be built: a
    feature that was ignored in silence would show as other logits.
    """
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in SUPPORTED:
        raise unsupported("architectures", f"a list with one of {', '.join(SUPPORTED)}", names)
    _check_common(hf_config)
    glm = name.startswith("Glm4")
    latent = _latent(hf_config) if name == "DeepseekV3ForCausalLM" else None
    heads = integer(hf_config, "num_attention_heads")
    hidden = integer(hf_config, "hidden_size")
    layers = integer(hf_config, "num_hidden_layers")
    if not glm:
        require(hf_config, "attention_bias", (False,))
    if latent is None:
        head_dim = integer(hf_config, "head_dim", default=hidden // heads)
        key_value_heads = integer(hf_config, "num_key_value_heads", default=heads)
        if heads % key_value_heads:
            raise unsupported("num_key_value_heads", f"a divisor of {heads}", key_value_heads)
    else:
        require(hf_config, "num_key_value_heads", (heads,))
        head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        key_value_heads = heads
    return Architecture(
        name=name,
        vocab_size=integer(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf_config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=integer(hf_config, "max_position_embeddings"),
        rms_norm_eps=number(hf_config, "rms_norm_eps"),
        tie_word_embeddings=boolean(hf_config, "tie_word_embeddings", default=False),
        rotary=read_rotary(
            hf_config,
            latent=latent is not None,
            interleaved=name == "Glm4ForCausalLM",
            default_fraction=0.5 if glm else 1.0,
        ),
        qk_norm=name.startswith("Qwen3")
        or (name == "Glm4MoeForCausalLM" and boolean(hf_config, "use_qk_norm", default=False)),
        qkv_bias=name == "Qwen2ForCausalLM"
        or boolean(hf_config, "attention_bias", default=name == "Glm4ForCausalLM"),
        sandwich_norms=name == "Glm4ForCausalLM",
        fused_gate_up=name == "Glm4ForCausalLM",
        experts=_experts(name, hf_config, layers),
        latent=latent,
        prediction_layers=_prediction_layers(name, hf_config),
    )


def _check_common(hf_config: Mapping[str, Any]) -> None:
    require(hf_config, "hidden_act", ("silu",))
    for key in ("mlp_bias", "use_sliding_window"):
        require(hf_config, key, (False,))
    require(hf_config, "attention_dropout", (0,))
    require(hf_config, "pretraining_tp", (1,))
    kinds = hf_config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise unsupported("layer_types", "full_attention in every layer", sorted(set(kinds)))
    if hf_config.get("quantization_config") is not None:
        raise unsupported(
            "quantization_config",
            "weights in bfloat16 or float32",
            hf_config["quantization_config"],
            "dequantise the model first, and take the key out of config.json",
        )


def _latent(hf_config: Mapping[str, Any]) -> Latent:
    require(hf_config, "rope_interleave", (True,))
    queries = hf_config.get("q_lora_rank")
    return Latent(
        q_lora_rank=None if queries is None else integer(hf_config, "q_lora_rank"),
        kv_lora_rank=integer(hf_config, "kv_lora_rank"),
        qk_nope_head_dim=integer(hf_config, "qk_nope_head_dim"),
        qk_rope_head_dim=integer(hf_config, "qk_rope_head_dim"),
        v_head_dim=integer(hf_config, "v_head_dim"),
    )


def _experts(name: str, hf_config: Mapping[str, Any], layers: int) -> Experts | None:
    if name == "Qwen3MoeForCausalLM":
        every = integer(hf_config, "decoder_sparse_step", default=1)
        dense = hf_config.get("mlp_only_layers") or []
        experts = Experts(
            num_experts=integer(hf_config, "num_experts", "num_local_experts"),
            num_experts_per_tok=integer(hf_config, "num_experts_per_tok"),
            intermediate_size=integer(hf_config, "moe_intermediate_size"),
            layers=tuple(n not in dense and (n + 1) % every == 0 for n in range(layers)),
            score_function="softmax",
            normalised=boolean(hf_config, "norm_topk_prob", default=False),
        )
    elif name in ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"):
        experts = _sigmoid_experts(hf_config, layers)
    else:
        return None
    if not any(experts.layers):
        raise unsupported(
            "layers with experts",
            "at least one",
            "none",
            "check first_k_dense_replace, mlp_only_layers and decoder_sparse_step",
        )
    if experts.num_experts_per_tok > experts.num_experts:
        raise unsupported(
            "num_experts_per_tok",
            f"at most the {experts.num_experts} experts",
            experts.num_experts_per_tok,
        )
    return experts


def _sigmoid_experts(hf_config: Mapping[str, Any], layers: int) -> Experts:
    """DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; GLM-4.5 has the same router."""
    require(hf_config, "scoring_func", ("sigmoid",))
    require(hf_config, "topk_method", ("noaux_tc",))
    require(hf_config, "moe_layer_freq", (1,))
    dense = hf_config.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise unsupported("first_k_dense_replace", "a whole number, 0 or more", dense)
    topk = integer(hf_config, "num_experts_per_tok")
    # Megatron divides by the sum exactly where it chooses more than one expert.
    require(hf_config, "norm_topk_prob", (topk > 1,))
    if hf_config.get("norm_topk_prob") is None and topk == 1:
        raise unsupported("norm_topk_prob", "false, with one expert a token", None)
    width = integer(hf_config, "moe_intermediate_size")
    groups, group_topk = _groups(hf_config, topk)
    return Experts(
        num_experts=integer(hf_config, "n_routed_experts", "num_local_experts"),
        num_experts_per_tok=topk,
        intermediate_size=width,
        layers=tuple(n >= dense for n in range(layers)),
        score_function="sigmoid",
        normalised=topk > 1,
        scaling=number(hf_config, "routed_scaling_factor"),
        correction_bias=True,
        groups=groups,
        group_topk=group_topk,
        shared_intermediate_size=width * integer(hf_config, "n_shared_experts"),
    )


def _groups(hf_config: Mapping[str, Any], topk: int) -> tuple[int | None, int | None]:
    groups, group_topk = integer(hf_config, "n_group"), integer(hf_config, "topk_group")
    experts = integer(hf_config, "n_routed_experts", "num_local_experts")
    if experts % groups or group_topk > groups or topk > experts // groups * group_topk:
        raise unsupported(
            "n_group, topk_group",
            f"equal groups of the {experts} experts, with {topk} experts in those that are chosen",
            f"{groups}, {group_topk}",
        )
    if group_topk == groups:
        return None, None  # every group is chosen
    if topk // group_topk != 2:
        raise unsupported(
            "topk_group",
            f"{topk} / 2: transformers ranks a group by its two best experts, Megatron by its "
            "num_experts_per_tok / topk_group best",
            group_topk,
        )
    return groups, group_topk


def _prediction_layers(name: str, hf_config: Mapping[str, Any]) -> int:
    if name not in ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"):
        return 0
    count = hf_config.get("num_nextn_predict_layers", 0) or 0
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise unsupported("num_nextn_predict_layers", "a whole number, 0 or more", count)
    return count
