"""Where TransformerEngine's modules stand in place of Megatron's own and ours.

Two settings ask for them. Context parallelism puts TransformerEngine's attention, the only one that
Megatron-Core divides along the sequence, into the layers that are built here anyway: names of
weights and all other arithmetic stay as they are. `--transformer-impl transformer_engine` takes
Megatron's whole layers of TransformerEngine's modules, in which the norm before a projection is
part of it (`linear_qkv.layer_norm_weight`; `trainer.weights.names`).

Both need a GPU, and neither has been run: there was none where this was written.
"""

from __future__ import annotations

import importlib
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.architecture import Architecture

__all__ = [
    "block_norm",
    "check_architecture",
    "context_attention",
    "engine_layer",
    "require_engine",
    "uses_engine",
]


def uses_engine(config: Any) -> bool:
    """Whether layers are wholly TransformerEngine's, by Megatron's configuration of a model."""
    return bool(config.transformer_impl == "transformer_engine")


def require_engine(asked_by: str) -> None:
    """Import TransformerEngine.

    Raises InvalidArgument, with what the import said, where it cannot be.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A library of CUDA that is missing raises OSError or RuntimeError, too.
        raise InvalidArgument(
            explain(
                "laying out the training",
                on=asked_by,
                expected="transformer_engine.pytorch to import",
                found=f"{type(error).__name__}: {error}",
                do="install transformer-engine[pytorch] for this torch and CUDA, or leave it out",
            )
        ) from error


def check_architecture(architecture: Architecture, config: Any) -> None:
    """Whether a model's layers can be built with what these settings ask for.

    Raises InvalidArgument, naming the option, where they cannot.
    """
    context = config.context_parallel_size > 1
    if not context and not uses_engine(config):
        return
    flag = "--context-parallel-size" if context else "--transformer-impl transformer_engine"
    if architecture.latent is not None:
        # Positions and widths of heads go other ways through Megatron's latent attention, and its
        # TransformerEngine form has norms inside projections that our names do not know.
        raise _refused(flag, "another attention: with latent attention nobody has checked it", "on")
    experts = architecture.experts is not None
    if uses_engine(config) and experts and config.expert_tensor_parallel_size > 1:
        # Megatron hides the division of experts' weights from TransformerEngine, which then marks
        # both projections as divided along their rows.
        raise _refused(
            "--transformer-impl transformer_engine",
            "--expert-tensor-parallel-size 1 for a model with experts",
            config.expert_tensor_parallel_size,
        )


def context_attention() -> Any:
    """The attention of a layer under context parallelism: Megatron's TEDotProductAttention."""
    require_engine("--context-parallel-size")
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    return extension.TEDotProductAttention


def engine_layer(architecture: Architecture, num_experts: int | None) -> Any:
    """Megatron's spec of a layer of TransformerEngine's modules."""
    require_engine("--transformer-impl")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=architecture.qk_norm
    )


def block_norm() -> Any:
    """The norm after the last of such layers: Megatron's TENorm."""
    return importlib.import_module("megatron.core.extensions.transformer_engine").TENorm


def _refused(on: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(explain("building the model", on=on, expected=expected, found=found))
