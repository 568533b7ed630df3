"""Where each canonical tensor lies: which part of which tensor of which ranks.

A *shard* is what one tensor-parallel rank holds of a canonical tensor, or all of it where it is not
divided. Data-parallel ranks, and tensor-parallel ones where nothing is divided, hold *copies* of a
shard. Stages of a pipeline and ranks of an expert-parallel group hold different tensors.

With one process every tensor is one shard in one copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.megatron import parallel_state, unwrap
from trainer.ranks import all_gather_object
from trainer.weights.names import TensorPart, tensor_parts

__all__ = ["CanonicalTensor", "Piece", "Placement", "chunks_of", "place", "tensors_of"]

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's shard of one canonical tensor."""

    part: TensorPart
    """Where it lies in the local tensor. Shapes are those of the shard, padding included."""
    key: str
    """Of the local tensor, in `Placement.local`."""
    shard: int
    """Which shard it is."""
    shards: int
    """How many there are."""


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """One tensor of the whole model, as every rank knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """False for a kept buffer: no gradient, no moments."""
    part: TensorPart
    """As the holder of the first shard has it: how shards are joined."""
    copies: tuple[tuple[int, ...], ...]
    """For each shard the global ranks that hold it, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The tensors of a rank's part of a model, and where the rest of the model is."""

    tensors: tuple[CanonicalTensor, ...]
    """Of the whole model, sorted by name: the same on every rank."""
    pieces: Mapping[str, Piece]
    """By canonical name: what this rank holds."""
    local: Mapping[str, Tensor]
    """This rank's parameters and kept buffers; keys are unique over its chunks."""
    repeated: Mapping[str, Piece]
    """Local parameters that only repeat another stage's, by key: the head of tied embeddings."""


def chunks_of(model: Any) -> list[Any]:
    """The chunks of a model that is one, or is a list of them."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def place(chunks: Sequence[Any]) -> Placement:
    """Find out together with the other ranks where the tensors of a model are. Collective.

    `chunks` are this rank's, wrapped or not. Raises InvalidArgument for a tensor that has no
    canonical name.
    """
    held: dict[str, Tensor] = {}
    pieces: dict[str, Piece] = {}
    repeated: dict[str, Piece] = {}
    told: dict[str, tuple[Any, ...]] = {}
    for number, chunk in enumerate(chunks):
        model = unwrap(chunk)
        architecture = model.trajectory_architecture
        named, keys = {}, {}
        for name, tensor in tensors_of(model).items():
            key, in_model = f"{number}:{name}", _name_in_model(model, name)
            held[key] = tensor
            keys[in_model], named[in_model] = key, tensor
        if model.share_embeddings_and_output_weights and not model.pre_process and HEAD in named:
            # The last stage of a pipeline keeps its own copy of a tied embedding.
            (part,) = tensor_parts(architecture, {EMBEDDING: named.pop(HEAD)})
            repeated[keys[HEAD]] = Piece(part, keys[HEAD], *_shard(part))
        for part in tensor_parts(architecture, named):
            shard, shards = _shard(part)
            if shards == 1 and part.axis is not None:
                part = replace(part, axis=None)
            tensor = named[part.parameter]
            pieces[part.name] = Piece(part, keys[part.parameter], shard, shards)
            rows = architecture.vocab_size if part.parameter in (EMBEDDING, HEAD) else None
            told[part.name] = (part, shard, shards, tensor.dtype, rows)
    return Placement(_gathered(all_gather_object(told)), pieces, held, repeated)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Parameters and kept buffers of a chunk by Megatron's names: what its weights are.

    The one kept buffer is the bias by which a sigmoid router chooses experts.
    """
    model = unwrap(model)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}"] = buffer
    return tensors


def _shard(part: TensorPart) -> tuple[int, int]:
    """(this rank's place in the group that the tensor is divided over, size of the group)."""
    if part.axis is None:
        return 0, 1
    if part.expert:
        return (
            int(parallel_state.get_expert_tensor_parallel_rank()),
            int(parallel_state.get_expert_tensor_parallel_world_size()),
        )
    return (
        int(parallel_state.get_tensor_model_parallel_rank()),
        int(parallel_state.get_tensor_model_parallel_world_size()),
    )


def _name_in_model(model: Any, name: str) -> str:
    """A tensor's name in the whole model: a rank numbers its layers and experts from 0."""
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return name
    layer, rest = model.decoder.layers[int(in_layer[1])], in_layer[2]
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        number = int(expert[2]) + layer.mlp.local_expert_indices[0]
        rest = f"{expert[1]}{number}.{expert[3]}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def _gathered(told: Sequence[Mapping[str, tuple[Any, ...]]]) -> tuple[CanonicalTensor, ...]:
    holders: dict[str, dict[int, list[int]]] = {}
    first: dict[str, tuple[Any, ...]] = {}
    for rank, tensors in enumerate(told):
        for name, what in tensors.items():
            holders.setdefault(name, {}).setdefault(what[1], []).append(rank)
            first.setdefault(name, what)
    found = []
    for name in sorted(holders):
        part, _, shards, dtype, rows = first[name]
        shape = list(part.whole_shape(shards))
        if rows is not None:
            shape[0] = rows
        copies = tuple(tuple(holders[name][shard]) for shard in range(shards))
        found.append(CanonicalTensor(name, tuple(shape), dtype, part.trained, part, copies))
    return tuple(found)
