"""Which part of which Megatron parameter is which canonical Hugging Face tensor.

Megatron keeps q, k and v of one query group side by side in one matrix, and gate and up
projection in another. `tensor_parts` lists, for a model, every canonical name with the part of
the parameter that holds it. The same part is cut from anything of the parameter's shape: its
gradient, Adam's moments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.architecture import Architecture

__all__ = ["TensorPart", "tensor_parts"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One canonical tensor as a part of a Megatron parameter."""

    name: str
    """Canonical Hugging Face name."""
    parameter: str
    """Megatron's name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the canonical tensor."""
    groups: int
    """Blocks that the parameter's first axis is made of; 1 where the part is one run of rows."""
    start: int
    """First row of the part within each block."""
    stop: int
    """One past its last row within each block."""

    def view(self, whole: Tensor) -> Tensor:
        """The part of `whole` (of the parameter's shape), without a copy: [groups, rows, …]."""
        blocks = whole.view(self.groups, whole.shape[0] // self.groups, *whole.shape[1:])
        return blocks[:, self.start : self.stop]

    def take(self, whole: Tensor) -> Tensor:
        """The canonical tensor, contiguous; it shares memory with `whole` if it is one run."""
        return self.view(whole).reshape(self.shape)

    def put(self, whole: Tensor, canonical: Tensor) -> None:
        """Copy a canonical tensor into its part of `whole`."""
        part = self.view(whole)
        part.copy_(canonical.reshape(part.shape))


_DENSE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "output_layer.score.weight": "score.weight",
    "output_layer.score.bias": "score.bias",
}

_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


def tensor_parts(
    architecture: Architecture, parameters: Mapping[str, Tensor]
) -> tuple[TensorPart, ...]:
    """The canonical tensors of a model, sorted by name. Every element of every parameter is in one.

    `parameters` are the model's, by Megatron's names, without prefixes of wrappers.

    Raises InvalidArgument for a parameter that has no canonical name.
    """
    parts: list[TensorPart] = []
    for name, parameter in parameters.items():
        parts.extend(_parts_of(architecture, name, parameter))
    return tuple(sorted(parts, key=lambda part: part.name))


def _parts_of(architecture: Architecture, name: str, parameter: Tensor) -> list[TensorPart]:
    if name in _DENSE:
        return [_whole(_DENSE[name], name, parameter)]
    in_layer = _LAYER_NAME.fullmatch(name)
    if in_layer is not None:
        layer, rest = f"model.layers.{in_layer[1]}", in_layer[2]
        if rest in _LAYER:
            return [_whole(f"{layer}.{_LAYER[rest]}", name, parameter)]
        if rest.startswith("self_attention.linear_qkv."):
            return _query_key_value(architecture, f"{layer}.self_attn", name, parameter)
        if rest == "mlp.linear_fc1.weight":
            return _gate_up(f"{layer}.mlp", name, parameter)
        expert = _EXPERT_NAME.fullmatch(rest)
        if expert is not None:
            prefix = f"{layer}.mlp.experts.{expert[1]}"
            if expert[2] == "linear_fc1":
                return _gate_up(prefix, name, parameter)
            return [_whole(f"{prefix}.down_proj.weight", name, parameter)]
    raise InvalidArgument(
        explain(
            "naming the parameters of the model",
            on=name,
            expected="a parameter with a canonical Hugging Face name",
            found=f"shape {tuple(parameter.shape)}, in {architecture.name}",
            do="add it to trainer/weights/names.py",
        )
    )


def _whole(canonical: str, name: str, parameter: Tensor) -> TensorPart:
    return TensorPart(canonical, name, tuple(parameter.shape), 1, 0, parameter.shape[0])


def _gate_up(prefix: str, name: str, parameter: Tensor) -> list[TensorPart]:
    half = parameter.shape[0] // 2
    shape = (half, *parameter.shape[1:])
    return [
        TensorPart(f"{prefix}.gate_proj.weight", name, shape, 1, 0, half),
        TensorPart(f"{prefix}.up_proj.weight", name, shape, 1, half, 2 * half),
    ]


def _query_key_value(
    architecture: Architecture, prefix: str, name: str, parameter: Tensor
) -> list[TensorPart]:
    groups, head_dim = architecture.num_key_value_heads, architecture.head_dim
    queries = architecture.num_attention_heads // groups * head_dim
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
            (groups * (stop - start), *parameter.shape[1:]),
            groups,
            start,
            stop,
        )
        for projection, (start, stop) in bounds.items()
    ]
