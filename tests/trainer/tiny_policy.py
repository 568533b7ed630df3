"""A policy of some thousands of parameters with random weights, dense or with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.model import build_model
from trainer.parallel import initialize
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import TrainState, create_state
from trainer.weights import export_weights, write_safetensors

VOCAB = 32


def start() -> None:
    initialize(ParallelSettings(), seed=1, num_threads=1, deterministic=True)


def config(*, moe: bool) -> dict[str, Any]:
    made = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if moe:
        made |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return made


def make_folder(folder: Path, *, moe: bool = False, seed: int = 0) -> Path:
    """Write a model with weights drawn from `seed`."""
    start()
    made = config(moe=moe)
    model = build_model(made, ParallelSettings(), trainable=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder, export_weights(model), made)
    return folder


def make_state(folder: Path, *, lr: float = 1e-2, **optimizer: Any) -> TrainState:
    start()
    return create_state(folder, ParallelSettings(), OptimizerSettings(lr=lr, **optimizer), seed=1)
