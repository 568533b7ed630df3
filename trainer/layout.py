"""Checks a layout before anything is started: plain arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.settings import ParallelSettings

__all__ = ["check_expert_groups", "check_layout", "check_model_layout", "padded_vocab_size"]

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "make_vocab_size_divisible_by",
)


def check_layout(settings: ParallelSettings, world_size: int, *, cuda: bool) -> None:
    """Whether `world_size` ranks can form the groups.

    Raises InvalidArgument, naming the option, where they cannot.
    """
    for name in _SIZES:
        size = getattr(settings, name)
        if size is not None and size < 1:
            raise _refused(_flag(name), "1 or more", size)
    _check_context(settings, cuda=cuda)
    _check_implementation(settings, cuda=cuda)
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    of_model = tensor * pipeline * settings.context_parallel_size
    if world_size % of_model:
        raise _refused(
            "tensor × pipeline × context parallel size",
            f"a divisor of the number of ranks, {world_size}",
            f"{tensor} × {pipeline} × {settings.context_parallel_size} = {of_model}",
            "start another number of ranks (torchrun --nproc-per-node), or change the sizes",
        )
    expert_tensor = settings.expert_tensor_parallel_size or tensor
    of_experts = expert_tensor * settings.expert_model_parallel_size * pipeline
    if world_size % of_experts:
        raise _refused(
            "expert tensor × expert × pipeline parallel size",
            f"a divisor of the number of ranks, {world_size}",
            f"{expert_tensor} × {settings.expert_model_parallel_size} × {pipeline} = {of_experts}",
            "start another number of ranks (torchrun --nproc-per-node), or change the sizes",
        )
    if settings.sequence_parallel and tensor == 1:
        raise _refused(
            "--sequence-parallel",
            "off without tensor parallelism: it splits the sequence over a tensor-parallel group",
            "on",
            "leave it out, or raise --tensor-model-parallel-size",
        )
    if settings.num_virtual_stages_per_pipeline_rank is not None and pipeline == 1:
        raise _refused(
            "--num-virtual-stages-per-pipeline-rank",
            "nothing without pipeline parallelism: chunks of one rank need no schedule",
            settings.num_virtual_stages_per_pipeline_rank,
            "leave it out, or raise --pipeline-model-parallel-size",
        )


def _check_context(settings: ParallelSettings, *, cuda: bool) -> None:
    if settings.context_parallel_size == 1:
        return
    missing = _missing_for_engine(cuda=cuda)
    if missing is not None:
        raise _refused(
            "--context-parallel-size",
            "1: Megatron-Core splits attention over the context only through TransformerEngine's "
            "TEDotProductAttention, on GPUs",
            f"{settings.context_parallel_size}, {missing}",
            "split the model by --tensor-model-parallel-size with --sequence-parallel instead",
        )
    if not settings.bf16:
        raise _refused(
            "--context-parallel-size",
            "--bf16 with it: TransformerEngine's attention over several ranks has kernels for 16 "
            "bits alone",
            "float32",
            "add --bf16",
        )
    if settings.attention_backend in ("local", "unfused"):
        raise _refused(
            "--attention-backend with --context-parallel-size",
            "auto, flash or fused: the others hold no part of a sequence",
            settings.attention_backend,
        )
    kinds = settings.megatron.get("cp_comm_type")
    if "a2a+p2p" in (kinds if isinstance(kinds, (list, tuple)) else [kinds]):
        raise _refused(
            "--cp-comm-type",
            "p2p, all_gather or a2a: no groups of two levels are started",
            "a2a+p2p",
        )


def _check_implementation(settings: ParallelSettings, *, cuda: bool) -> None:
    kind = settings.megatron.get("transformer_impl", "local")
    if kind == "local":
        return
    missing = _missing_for_engine(cuda=cuda)
    if kind != "transformer_engine":
        raise _refused("--transformer-impl", "local or transformer_engine: it trains", kind)
    if missing is not None:
        raise _refused(
            "--transformer-impl", "local, where there is no TransformerEngine", f"{kind}, {missing}"
        )


def _missing_for_engine(*, cuda: bool) -> str | None:
    """What TransformerEngine's modules lack here; None where nothing is known to be missing."""
    if not cuda:
        return "no CUDA device"
    if find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    return None


def check_model_layout(
    settings: ParallelSettings,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    num_experts: int | None,
) -> None:
    """Whether a model of these sizes can be split so.

    Raises InvalidArgument, naming the option, where it cannot.
    """
    tensor = settings.tensor_model_parallel_size
    for what, count in (
        ("attention heads", num_attention_heads),
        ("groups of keys and values", num_query_groups),
    ):
        if count % tensor:
            raise _refused(
                "--tensor-model-parallel-size", f"a divisor of the model's {count} {what}", tensor
            )
    chunks = settings.pipeline_model_parallel_size * (
        settings.num_virtual_stages_per_pipeline_rank or 1
    )
    uneven = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"}
    if num_layers % chunks and not uneven & settings.megatron.keys():
        raise _refused(
            "pipeline ranks × chunks of each",
            f"a divisor of the model's {num_layers} layers",
            chunks,
            "change --pipeline-model-parallel-size or --num-virtual-stages-per-pipeline-rank",
        )
    expert = settings.expert_model_parallel_size
    if num_experts is None:
        if expert != 1:
            raise _refused("--expert-model-parallel-size", "1: the model has no experts", expert)
        return
    if num_experts % expert:
        raise _refused(
            "--expert-model-parallel-size",
            f"a divisor of the model's {num_experts} experts",
            expert,
        )
    if tensor > 1 and not settings.sequence_parallel:
        raise _refused(
            "--sequence-parallel",
            "on: Megatron trains experts beside tensor parallelism only with it",
            "off",
        )


def check_expert_groups(config: Any, group_sizes: Mapping[str, int]) -> None:
    """Compare a model's configuration with the process groups that were started.

    `config` has the sizes by Megatron's names (a TransformerConfig), `group_sizes` those of the
    groups. Where the two disagree about expert tensor parallelism, Megatron leaves the gradients of
    experts unreduced without a word.

    Raises InvalidArgument, naming the size that differs.
    """
    for name, size in group_sizes.items():
        found = getattr(config, name)
        if found != size:
            raise _refused(
                _flag(name),
                f"{size}, as in the process groups that were started",
                f"{found} in the configuration of the model",
                "give one number to both: hand trainer.parallel.initialize and build_model the "
                "same ParallelSettings",
            )


def padded_vocab_size(vocab_size: int, settings: ParallelSettings) -> int:
    """Rows of the embedding: `vocab_size`, and padding so that every tensor rank has as many."""
    multiple = settings.make_vocab_size_divisible_by * settings.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refused(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("laying out the training", on=on, expected=expected, found=found, do=do)
    )
