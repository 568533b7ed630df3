"""Builds Megatron-Core's GPTModel from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from ledger.errors import InvalidArgument, explain
from trainer.architecture import Architecture, read_architecture, read_config
from trainer.cpu_shim import model_on_cpu
from trainer.forward import recorded_routing, token_log_probs
from trainer.layer_specs import (
    block_spec,
    config_class,
    config_options,
    finish_model,
    keep_float32,
    model_options,
)
from trainer.layout import check_expert_groups, check_model_layout, padded_vocab_size
from trainer.megatron import (
    AttnBackend,
    ColumnParallelLinear,
    Float16Module,
    GPTModel,
    RouterReplay,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    parallel_state,
    set_tensor_model_parallel_attributes,
    unwrap,
)
from trainer.megatron_args import passed_on
from trainer.parallel import device
from trainer.routing_replay import guide_routers
from trainer.settings import ParallelSettings

__all__ = [
    "architecture_of",
    "build_chunks",
    "build_model",
    "group_sizes",
    "read_config",
    "recorded_routing",
    "token_log_probs",
    "unwrap",
]


def build_model(
    hf_config: Mapping[str, Any], parallel: ParallelSettings, *, trainable: bool
) -> Any:
    """As `build_chunks`, for a layout in which a rank has one chunk: that chunk.

    Raises InvalidArgument where the layout has several.
    """
    chunks = build_chunks(hf_config, parallel, trainable=trainable)
    if len(chunks) != 1:
        raise InvalidArgument(
            explain(
                "building a model in one piece",
                on="--num-virtual-stages-per-pipeline-rank",
                expected="one chunk a rank",
                found=len(chunks),
            )
        )
    return chunks[0]


def build_chunks(
    hf_config: Mapping[str, Any], parallel: ParallelSettings, *, trainable: bool
) -> list[Any]:
    """This rank's part of a GPTModel, whose parameters are *not initialised*: load weights into it.

    One chunk, or several with an interleaved pipeline; the first chunk of the first stage has the
    embedding, the last chunk of the last stage the output layer. Each is a GPTModel, in Megatron's
    Float16Module with `bf16`: `unwrap` gives the GPTModel. Rows of padding in the vocabulary are
    zero.

    `trainable=False` gives a frozen model (a reference): no parameter requires a gradient, and it
    is in evaluation mode. The process groups must have been started
    (`trainer.parallel.initialize`).

    Raises InvalidArgument for an architecture, a feature or a layout that cannot be built, and
    where the process groups are not those of `parallel`.
    """
    architecture = read_architecture(hf_config)
    check_model_layout(
        parallel,
        num_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        num_experts=architecture.num_experts,
    )
    config = transformer_config(architecture, parallel)
    check_expert_groups(config, group_sizes())
    stages = parallel.num_virtual_stages_per_pipeline_rank
    chunks = [
        _build_chunk(architecture, config, parallel, vp_stage)
        for vp_stage in ([None] if stages is None else range(stages))
    ]
    for chunk in chunks:
        if not trainable:
            chunk.requires_grad_(False)
            chunk.eval()
    return chunks


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    parallel: ParallelSettings,
    vp_stage: int | None,
) -> Any:
    block = block_spec(
        architecture,
        config,
        vp_stage=vp_stage,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
    )
    options = model_options(architecture)
    options["vocab_size"] = padded_vocab_size(architecture.vocab_size, parallel)
    virtual = {"ignore_virtual": False, "vp_stage": vp_stage}
    others = list(RouterReplay.global_router_replay_instances)
    with model_on_cpu():
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            parallel_output=True,
            vp_stage=vp_stage,
            **options,
        )
    # Megatron's list of routers is global to the process. We address the routers of one model
    # through the model, and leave the list without them, so that nobody drives two models by
    # accident.
    RouterReplay.global_router_replay_instances[:] = others
    guide_routers(model)
    model.trajectory_architecture = architecture
    finish_model(model)
    _mark_shards(model)
    model.to(device())
    if not config.bf16:
        return model
    wrapped = Float16Module(config, model)
    keep_float32(model)
    return wrapped


def _mark_shards(model: GPTModel) -> None:
    """Tell each parameter how it is split over its tensor-parallel group.

    Megatron does so where it initialises weights, which we leave out. Without the marks its norm of
    the gradients would count the shards of one rank only.

    Where experts are divided over another group than the rest, their gradients are summed over
    another group too. Megatron says so on a parameter (`allreduce`) only with expert parallelism.
    """
    config = model.config
    of_its_own = (
        config.expert_model_parallel_size > 1
        or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    for module in model.modules():
        split: int | None = None
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            split = 0
        elif isinstance(module, RowParallelLinear):
            split = 1
        if split is not None and module.weight is not None:
            _mark(module.weight, split)
            if split == 0 and getattr(module, "bias", None) is not None:
                _mark(module.bias, 0)
        if getattr(module, "is_expert", False):
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = not of_its_own


def _mark(parameter: Any, split: int) -> None:
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, name):
            delattr(parameter, name)
    set_tensor_model_parallel_attributes(parameter, True, split, 1)


def group_sizes() -> dict[str, int]:
    """Sizes of the process groups that were started, by the names of TransformerConfig."""
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def transformer_config(architecture: Architecture, parallel: ParallelSettings) -> TransformerConfig:
    """Megatron's configuration of an architecture: no dropout, every fusion off.

    With the fusions off, the local layers compute in the order of the Hugging Face code, so that
    logits of dense models in float32 are bitwise those of its eager attention on a CPU.
    `parallel.megatron` comes last: it may set what stands at another value here.
    """
    expert_tensor_parallel_size = parallel.expert_tensor_parallel_size
    if expert_tensor_parallel_size is None:
        expert_tensor_parallel_size = parallel.tensor_model_parallel_size
    dtype = torch.bfloat16 if parallel.bf16 else torch.float32
    interleaved = parallel.num_virtual_stages_per_pipeline_rank is not None
    options: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": parallel.bf16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.num_virtual_stages_per_pipeline_rank,
        # In an interleaved pipeline of two ranks the next stage is also the one before: only the
        # order of sends and receives without batching tells the two directions apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        # The same number as the process groups get: where they differ, Megatron leaves expert
        # gradients unreduced without a word.
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
        # Without experts it means nothing, but Megatron checks it against the pipeline's settings.
        "moe_token_dispatcher_type": "alltoall"
        if architecture.num_experts is None
        else parallel.moe_token_dispatcher_type,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "attention_backend": AttnBackend[parallel.attention_backend],
        "transformer_impl": "local",
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
    }
    options |= config_options(architecture)
    kind = config_class(architecture)
    options |= passed_on(kind, parallel.megatron)
    try:
        return kind(**options)
    except (ValueError, AssertionError) as error:
        raise InvalidArgument(
            explain(
                "configuring Megatron-Core's model",
                on=architecture.name,
                expected="settings that go together",
                found=error,
                do="change the setting that it names",
            )
        ) from error


def architecture_of(model: Any) -> Architecture:
    """The architecture that `build_model` made the model from."""
    return cast(Architecture, unwrap(model).trajectory_architecture)
