"""Builds Megatron-Core's GPTModel from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from trainer.architecture import Architecture, read_architecture, read_config
from trainer.forward import recorded_routing, token_log_probs
from trainer.layer_specs import (
    block_spec,
    config_class,
    config_options,
    finish_model,
    model_options,
)
from trainer.megatron import GPTModel, RouterReplay, TransformerConfig, unwrap
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
    others = list(RouterReplay.global_router_replay_instances)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(architecture, config),
        pre_process=True,
        post_process=True,
        parallel_output=True,
        **model_options(architecture),
    )
    # Megatron's list of routers is global to the process. We address the routers of one model
    # through the model, and leave the list without them, so that nobody drives two models by
    # accident.
    RouterReplay.global_router_replay_instances[:] = others
    model.trajectory_architecture = architecture
    finish_model(model)
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
    expert_tensor_parallel_size = parallel.expert_tensor_parallel_size
    if expert_tensor_parallel_size is None:
        expert_tensor_parallel_size = parallel.tensor_model_parallel_size
    options = dict(
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
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        **config_options(architecture),
    )
    return config_class(architecture)(**options)


def architecture_of(model: Any) -> Architecture:
    """The architecture that `build_model` made the model from."""
    return cast(Architecture, unwrap(model).trajectory_architecture)
