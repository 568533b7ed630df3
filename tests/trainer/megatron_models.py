"""Tiny random models for the Megatron tests, as Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = ("llama", "llama_untied", "qwen3", "qwen3_moe", "qwen3_moe_unnormalised")
DENSE = KINDS[:3]
MOE = KINDS[3:]
NEWER = (
    "llama3_rope",
    "qwen2",
    "glm4",
    "qwen3_moe_sparse",
    "glm4_moe",
    "glm4_moe_qk_norm",
    "deepseek_v3",
    "deepseek_v3_yarn",
)
"""Further architectures: dense ones, then with experts and at least one layer without."""
NEWER_DENSE = NEWER[:3]
NEWER_MOE = NEWER[3:]
VOCAB = 97

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about running without CUDA")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@dataclass(frozen=True)
class Tiny:
    """A Hugging Face model and the folder it was saved to."""

    kind: str
    folder: Path
    model: Any


def make(kind: str, folder: Path, **changes: Any) -> Tiny:
    """Make and save one of KINDS or NEWER; the same weights each time. `changes` are of the
    configuration of one of NEWER."""
    import transformers as hf

    torch.manual_seed((KINDS + NEWER).index(kind) + 1)
    if kind == "llama":
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **_COMMON, tie_word_embeddings=True, rope_theta=100000.0, rms_norm_eps=1e-5
            )
        )
    elif kind == "llama_untied":
        # A head dimension whose scale is no power of two.
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON, head_dim=24))
    elif kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**_COMMON, head_dim=32))
    elif kind in MOE:
        normalised = kind == "qwen3_moe"
        model = hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**_COMMON, **_EXPERTS, head_dim=16, norm_topk_prob=normalised)
        )
    else:
        model = _newer(kind, changes)
    with torch.no_grad():
        # Norms of ones would hide one that is loaded into the place of another; so would biases of
        # zeros.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
        if kind in NEWER_MOE:
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.normal_(0.0, 0.3)
    model.float().eval()
    model.save_pretrained(folder)
    return Tiny(kind, folder, model)


_SMALL: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SIGMOID: dict[str, Any] = {
    **_SMALL,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def _newer(kind: str, changes: dict[str, Any]) -> Any:
    import transformers as hf

    small, sigmoid = {**_SMALL, **changes}, {**_SIGMOID, **changes}
    if kind == "llama3_rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, head_dim=32, rope_parameters=rope))
    if kind == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**small, tie_word_embeddings=True))
    if kind == "glm4":
        return hf.Glm4ForCausalLM(hf.Glm4Config(**small, head_dim=16))
    if kind == "qwen3_moe_sparse":
        settings = {**_SMALL, "num_hidden_layers": 3, "decoder_sparse_step": 2, **changes}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**settings, **_EXPERTS, head_dim=16))
    if kind.startswith("glm4_moe"):
        qk_norm = kind == "glm4_moe_qk_norm"
        return hf.Glm4MoeForCausalLM(
            hf.Glm4MoeConfig(
                **sigmoid,
                num_experts_per_tok=3,
                head_dim=16,
                use_qk_norm=qk_norm,
                attention_bias=not qk_norm,
            )
        )
    yarn = kind == "deepseek_v3_yarn"
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**sigmoid, "num_key_value_heads": 4},
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            q_lora_rank=None if yarn else 24,
            kv_lora_rank=20,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            rms_norm_eps=1e-5 if yarn else 1e-6,
            rope_parameters=_YARN if yarn else None,
        )
    )


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def random_tokens(rows: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """int64 [rows, width] of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, width), generator=generator)
