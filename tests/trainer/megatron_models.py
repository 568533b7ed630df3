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


def make(kind: str, folder: Path) -> Tiny:
    """Make and save one of KINDS; the same weights each time."""
    import transformers as hf

    torch.manual_seed(KINDS.index(kind) + 1)
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
    else:
        normalised = kind == "qwen3_moe"
        model = hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**_COMMON, **_EXPERTS, head_dim=16, norm_topk_prob=normalised)
        )
    with torch.no_grad():
        # Norms of ones would hide one that is loaded into the place of another.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.float().eval()
    model.save_pretrained(folder)
    return Tiny(kind, folder, model)


def random_tokens(rows: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """int64 [rows, width] of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, width), generator=generator)
