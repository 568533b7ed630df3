"""Which part of which Megatron tensor is which canonical Hugging Face tensor.

Megatron keeps q, k and v of one query group side by side in one matrix, and gate and up
projection in another. `tensor_parts` lists, for a model, every canonical name with the part of
the tensor that holds it. The same part is cut from anything of that tensor's shape: its
gradient, Adam's moments.

Under tensor parallelism a rank holds a piece of each part: what `take` cuts from the local tensor.
The canonical tensor is `join` of the ranks' pieces, in the order of the ranks, and `piece` is the
way back. Along which axis pieces lie is what Megatron says on its parameters; a parameter without
a mark is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.architecture import Architecture

__all__ = ["TensorPart", "tensor_parts"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One canonical tensor as a part of a Megatron tensor."""

    name: str
    """Canonical Hugging Face name."""
    parameter: str
    """Megatron's name of the tensor, on this rank."""
    shape: tuple[int, ...]
    """Shape of this rank's piece of the canonical tensor."""
    groups: int
    """Blocks that the first axis of the local tensor is made of; 1 where the part is one run."""
    start: int
    """First row of the part within each block."""
    stop: int
    """One past its last row within each block."""
    axis: int | None = None
    """Axis of the canonical tensor along which the pieces of the tensor-parallel ranks lie.
    None: each rank holds all of it."""
    folds: int = 1
    """Equal blocks of the canonical tensor along `axis`, each of which is divided over the ranks.
    2 for a gate and an up projection in one tensor."""
    expert: bool = False
    """It belongs to one of the routed experts: the ranks are those of expert tensor parallelism."""
    trained: bool = True
    """False for what is no parameter: the bias by which a router chooses. No gradient, no moments.
    """

    def view(self, whole: Tensor) -> Tensor:
        """The part of `whole` (of the local tensor's shape), without a copy: [groups, rows, …]."""
        blocks = whole.view(self.groups, whole.shape[0] // self.groups, *whole.shape[1:])
        return blocks[:, self.start : self.stop]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece, contiguous; it shares memory with `whole` if it is one run."""
        return self.view(whole).reshape(self.shape)

    def put(self, whole: Tensor, piece: Tensor) -> None:
        """Copy a piece into its part of `whole`. Narrower floats are widened, which is exact."""
        part = self.view(whole)
        part.copy_(piece.reshape(part.shape))

    def whole_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of the canonical tensor over `ranks` tensor-parallel ranks."""
        if self.axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.axis] *= ranks
        return tuple(shape)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The canonical tensor from the pieces of all tensor-parallel ranks, in their order."""
        if self.axis is None or len(pieces) == 1:
            return pieces[0]
        if self.folds == 1:
            return torch.cat(list(pieces), dim=self.axis)
        folded = [self._fold(piece) for piece in pieces]
        return torch.cat(folded, dim=self.axis + 1).reshape(self.whole_shape(len(pieces)))

    def piece(self, canonical: Tensor, rank: int, ranks: int) -> Tensor:
        """The piece of tensor-parallel rank `rank` of `ranks`; it shares memory where it can."""
        if self.axis is None or ranks == 1:
            return canonical
        if self.folds == 1:
            size = self.shape[self.axis]
            return canonical.narrow(self.axis, rank * size, size)
        size = self.shape[self.axis] // self.folds
        folded = self._fold(canonical).narrow(self.axis + 1, rank * size, size)
        return folded.reshape(self.shape)

    def _fold(self, tensor: Tensor) -> Tensor:
        axis, shape = self.axis or 0, tensor.shape
        return tensor.reshape(*shape[:axis], self.folds, -1, *shape[axis + 1 :])


_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "output_layer.score.weight": "score.weight",
    "output_layer.score.bias": "score.bias",
}

_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn_bda.norm.weight": "post_self_attn_layernorm.weight",
    "mlp_bda.norm.weight": "post_mlp_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    # TransformerEngine's projections hold the norm before them.
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}

_GROUPED_QUERIES = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}

_LATENT = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


def tensor_parts(
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    layer_offset: int = 0,
    expert_offset: int = 0,
) -> tuple[TensorPart, ...]:
    """The canonical tensors of a model, sorted by name. Every element of every tensor is in one.

    `tensors` are the parameters and kept buffers of this rank's part of the model, by Megatron's
    names without prefixes of wrappers. Megatron numbers the layers of a pipeline stage and the
    experts of a rank from 0: the offsets are the numbers of the first ones.

    Raises InvalidArgument for a tensor that has no canonical name.
    """
    parts: list[TensorPart] = []
    for name, tensor in tensors.items():
        parts.extend(_parts_of(architecture, name, tensor, layer_offset, expert_offset))
    return tuple(sorted(parts, key=lambda part: part.name))


def _parts_of(
    architecture: Architecture, name: str, tensor: Tensor, layer_offset: int, expert_offset: int
) -> list[TensorPart]:
    if name in _OUTSIDE:
        return [_whole(_OUTSIDE[name], name, tensor)]
    in_layer = _LAYER_NAME.fullmatch(name)
    if in_layer is None:
        raise _nameless(architecture, name, tensor)
    layer, rest = f"model.layers.{int(in_layer[1]) + layer_offset}", in_layer[2]
    known = _LAYER | (_GROUPED_QUERIES if architecture.latent is None else _LATENT)
    if rest in known:
        return [_whole(f"{layer}.{known[rest]}", name, tensor)]
    if rest.startswith("self_attention.linear_qkv."):
        return _query_key_value(architecture, f"{layer}.self_attn", name, tensor)
    if rest == "mlp.linear_fc1.weight":
        if architecture.fused_gate_up:
            return [_whole(f"{layer}.mlp.gate_up_proj.weight", name, tensor, folds=2)]
        return _gate_up(f"{layer}.mlp", name, tensor)
    if rest == "mlp.shared_experts.linear_fc1.weight":
        return _gate_up(f"{layer}.mlp.shared_experts", name, tensor)
    expert = _EXPERT_NAME.fullmatch(rest)
    if expert is not None:
        prefix = f"{layer}.mlp.experts.{int(expert[1]) + expert_offset}"
        if expert[2] == "linear_fc1":
            return _gate_up(prefix, name, tensor, expert=True)
        return [_whole(f"{prefix}.down_proj.weight", name, tensor, expert=True)]
    raise _nameless(architecture, name, tensor)


def _nameless(architecture: Architecture, name: str, tensor: Tensor) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "naming the weights of the model",
            on=name,
            expected="a tensor with a canonical Hugging Face name",
            found=f"shape {tuple(tensor.shape)}, in {architecture.name}",
            do="add it to trainer/weights/names.py",
        )
    )


def _axis(tensor: Any) -> int | None:
    """Where Megatron says that the tensor is divided."""
    if getattr(tensor, "tensor_model_parallel", False):
        return int(tensor.partition_dim)
    return None


def _whole(
    canonical: str, name: str, tensor: Tensor, *, folds: int = 1, expert: bool = False
) -> TensorPart:
    return TensorPart(
        canonical,
        name,
        tuple(tensor.shape),
        1,
        0,
        tensor.shape[0],
        axis=_axis(tensor),
        folds=folds,
        expert=expert,
        trained=isinstance(tensor, torch.nn.Parameter),
    )


def _gate_up(prefix: str, name: str, tensor: Tensor, *, expert: bool = False) -> list[TensorPart]:
    half = tensor.shape[0] // 2
    shape, axis = (half, *tensor.shape[1:]), _axis(tensor)
    return [
        TensorPart(
            f"{prefix}.{projection}.weight", name, shape, 1, start, stop, axis=axis, expert=expert
        )
        for projection, start, stop in (("gate_proj", 0, half), ("up_proj", half, 2 * half))
    ]


def _query_key_value(
    architecture: Architecture, prefix: str, name: str, tensor: Tensor
) -> list[TensorPart]:
    head_dim = architecture.head_dim
    queries = architecture.num_attention_heads // architecture.num_key_value_heads * head_dim
    groups = tensor.shape[0] // (queries + 2 * head_dim)
    kind = name.rsplit(".", 1)[1]
    bounds = {
        "q_proj": (0, queries),
        "k_proj": (queries, queries + head_dim),
        "v_proj": (queries + head_dim, queries + 2 * head_dim),
    }
    return [
        TensorPart(
            f"{prefix}.{projection}.{kind}",
            name,
            (groups * (stop - start), *tensor.shape[1:]),
            groups,
            start,
            stop,
            axis=_axis(tensor),
        )
        for projection, (start, stop) in bounds.items()
    ]
