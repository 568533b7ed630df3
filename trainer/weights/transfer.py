"""Weights of a Megatron model to and from canonical Hugging Face names, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import unwrap
from trainer.model import architecture_of
from trainer.weights.names import TensorPart, tensor_parts

__all__ = ["export_weights", "import_weights", "parts_of", "tensors_of"]


def parts_of(model: Any) -> tuple[TensorPart, ...]:
    """The canonical tensors of a model, sorted by name."""
    return tensor_parts(architecture_of(model), tensors_of(model))


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Parameters and kept buffers by Megatron's names: what the weights of the model are.

    The one kept buffer is the bias by which a sigmoid router chooses experts.
    """
    tensors: dict[str, Tensor] = dict(unwrap(model).named_parameters())
    for prefix, module in unwrap(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}"] = buffer
    return tensors


def export_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Canonical name and tensor, sorted by name; tied embeddings once, as Hugging Face saves them.

    Tensors are contiguous and detached. Most share memory with the model and are made one at a
    time: use each before the next optimizer step, or clone it.
    """
    tensors = tensors_of(model)
    for part in parts_of(model):
        yield part.name, part.take(tensors[part.parameter].detach())


def import_weights(model: Any, named: Mapping[str, Tensor]) -> None:
    """Copy canonical tensors into a model, every one of them.

    Raises InvalidArgument, before anything is copied, where a tensor is missing, unknown, or has
    another shape or dtype than the model.
    """
    tensors = tensors_of(model)
    parts = parts_of(model)
    named = _without_tied_head(named, {part.name for part in parts})
    _compare(parts, tensors, named)
    with torch.no_grad():
        for part in parts:
            part.put(tensors[part.parameter], named[part.name])


def _without_tied_head(named: Mapping[str, Tensor], wanted: set[str]) -> Mapping[str, Tensor]:
    """Drop a stored lm_head that only repeats the tied embedding; one that differs is refused."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in named or head in wanted or embedding not in named:
        return named
    if torch.equal(named[head], named[embedding]):
        return {name: tensor for name, tensor in named.items() if name != head}
    raise InvalidArgument(
        explain(
            "loading weights",
            on=head,
            expected=f"the same bits as {embedding}: the configuration ties them",
            found="other values",
            do="set tie_word_embeddings to false in config.json if the model has its own head",
        )
    )


def _compare(
    parts: tuple[TensorPart, ...],
    tensors: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
) -> None:
    wanted = {part.name: part for part in parts}
    missing = sorted(wanted.keys() - named.keys())
    unknown = sorted(named.keys() - wanted.keys())
    if missing or unknown:
        raise InvalidArgument(
            explain(
                "loading weights",
                expected=f"the {len(wanted)} tensors of the model",
                found=f"missing: {_first(missing)}; unknown: {_first(unknown)}",
                do="check that the weights and config.json belong together",
            )
        )
    for name, part in wanted.items():
        tensor, dtype = named[name], tensors[part.parameter].dtype
        if tuple(tensor.shape) != part.shape or tensor.dtype != dtype:
            raise InvalidArgument(
                explain(
                    "loading weights",
                    on=name,
                    expected=f"{part.shape} {dtype}",
                    found=f"{tuple(tensor.shape)} {tensor.dtype}",
                    do="convert the checkpoint to float32 first"
                    if tensor.dtype != dtype
                    else "check that the weights and config.json belong together",
                )
            )


def _first(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:3])} and {len(names) - 3} more"
