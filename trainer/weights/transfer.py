"""Tensors of a Megatron model to and from canonical Hugging Face names, bit for bit.

Whatever the layout, one canonical tensor at a time is put together from its shards on the rank that
needs it; no rank ever holds the whole model for it. Everything here is collective: all ranks call
it with the same arguments, and go through a generator to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.architecture import Architecture
from trainer.model import architecture_of
from trainer.parallel import device
from trainer.weights.names import TensorPart
from trainer.weights.placement import CanonicalTensor, Piece, Placement, chunks_of, place

__all__ = ["assemble", "export_weights", "import_weights", "local_values", "parts_of"]

Destination = int | Literal["spread"]


def parts_of(model: Any) -> tuple[TensorPart, ...]:
    """This rank's parts of the canonical tensors of a model, sorted by name. Collective."""
    return tuple(piece.part for _, piece in sorted(place(chunks_of(model)).pieces.items()))


def export_weights(
    model: Any, *, to: Destination = 0, placement: Placement | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Canonical name and tensor, sorted by name; tied embeddings once, as Hugging Face saves them.

    `model` is a rank's only chunk, or the list of its chunks. The tensors come out on the rank
    `to`, and nothing on the others; with 'spread' each comes out on one of the ranks that hold a
    part of it, and the ranks share the work. Tensors are contiguous and detached. Most share memory
    with the model: use each before the next optimizer step, or clone it.
    """
    found = place(chunks_of(model)) if placement is None else placement
    return assemble(found, lambda key: found.local[key].detach(), to=to)


def assemble(
    placement: Placement,
    local: Callable[[str], Tensor],
    *,
    to: Destination,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The canonical tensors of something that local tensors have: their values, gradients, moments.

    `local(key)` gives it in the shape of a local tensor of this rank. It may itself be collective
    among the copies of that tensor: all of them call it once a key, in the same order. `dtype` is
    that of all, for what only trained tensors have; without it they are those of the tensors
    themselves. Comes out as in `export_weights`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    values = _Once(placement, local, only_trained=dtype is not None)
    for number, tensor in enumerate(placement.tensors):
        if dtype is not None and not tensor.trained:
            continue
        piece = placement.pieces.get(tensor.name)
        mine = None if piece is None else piece.part.take(values.of(piece.key))
        sources, target = _route(tensor, number, to)
        if rank == target:
            wanted = tensor.dtype if dtype is None else dtype
            shards = [
                _own(mine, tensor) if source == rank else _receive(tensor, wanted, source)
                for source in sources
            ]
            yield tensor.name, tensor.part.join(shards)[: tensor.shape[0]]
        elif rank in sources:
            # As bytes: neither gloo nor nccl knows every dtype.
            dist.send(_bytes(_own(mine, tensor)), dst=target)


class _Once:
    """The values of local tensors, each made once and kept until its last part was taken."""

    def __init__(
        self, placement: Placement, local: Callable[[str], Tensor], *, only_trained: bool
    ) -> None:
        self._local = local
        self._left = Counter(
            piece.key
            for piece in placement.pieces.values()
            if piece.part.trained or not only_trained
        )
        self._kept: dict[str, Tensor] = {}

    def of(self, key: str) -> Tensor:
        value = self._kept.pop(key, None)
        if value is None:
            value = self._local(key)
        self._left[key] -= 1
        if self._left[key]:
            self._kept[key] = value
        return value


def _route(tensor: CanonicalTensor, number: int, to: Destination) -> tuple[list[int], int]:
    """(the rank that gives each shard, the rank that gets them).

    All transfers have one order on all ranks, so that none waits for one that waits for it.
    """
    if to == "spread":
        sources = [ranks[number % len(ranks)] for ranks in tensor.copies]
        return sources, sources[number % len(sources)]
    return [to if to in ranks else ranks[0] for ranks in tensor.copies], to


def _own(mine: Tensor | None, tensor: CanonicalTensor) -> Tensor:
    if mine is None:
        raise RuntimeError(f"a rank that gives {tensor.name} holds a part of it")
    return mine


def _receive(tensor: CanonicalTensor, dtype: torch.dtype, source: int) -> Tensor:
    shard = torch.empty(tensor.part.shape, dtype=dtype, device=device())
    dist.recv(_bytes(shard), src=source)
    return shard


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def import_weights(
    model: Any,
    named: Mapping[str, Any],
    *,
    placement: Placement | None = None,
    convert: bool = False,
) -> None:
    """Copy canonical tensors into this rank's part of a model, every one of them.

    `named` has the tensors of the whole model, or handles that read them in slices (safetensors'
    `get_slice`): each rank reads its own shards alone. Rows that pad the vocabulary become zero.
    With `convert`, floats of 16 and of 32 bits become those of the model: widening is exact,
    narrowing rounds to the nearest.

    Layers of multi-token prediction, where the configuration states some, are left out.

    Raises InvalidArgument, before anything is copied, where a tensor is missing, unknown, or has
    another shape or dtype than the model.
    """
    found = place(chunks_of(model)) if placement is None else placement
    named = _without_prediction_layers(named, architecture_of(chunks_of(model)[0]))
    named = _without_tied_head(named, {tensor.name for tensor in found.tensors})
    _compare(found, named, _CONVERTED if convert else ())
    with torch.no_grad():
        for key, value in local_values(found, named):
            found.local[key].copy_(value)


def local_values(
    placement: Placement, named: Mapping[str, Any], *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Key and value of each local tensor of this rank, from canonical tensors. Not collective.

    One local tensor is held at a time. With `dtype` only trained ones, in that dtype. Padding is
    zero.
    """
    pieces: dict[str, list[Piece]] = {}
    for piece in (*placement.pieces.values(), *placement.repeated.values()):
        if dtype is None or piece.part.trained:
            pieces.setdefault(piece.key, []).append(piece)
    for key, of_tensor in pieces.items():
        local = placement.local[key]
        value = torch.zeros(local.shape, dtype=local.dtype if dtype is None else dtype)
        for piece in of_tensor:
            part = piece.part
            shard = _cut(named[part.name], piece)
            missing = part.shape[0] - shard.shape[0]
            if missing:
                padding = shard.new_zeros((missing, *shard.shape[1:]))
                shard = torch.cat([shard, padding])
            part.put(value, shard)
        yield key, value.to(local.device)


def _cut(source: Any, piece: Piece) -> Tensor:
    """A shard of a canonical tensor; of a handle nothing else is read. Padding is left out."""
    part, axis = piece.part, piece.part.axis
    if axis is None:
        whole: Tensor = source[:]
        return whole
    whole_length, folds = _source_shape(source)[axis], part.folds
    size, block = part.shape[axis] // folds, whole_length // folds
    runs = []
    for fold in range(folds):
        start = min(fold * block + piece.shard * size, whole_length)
        stop = min(start + size, whole_length)
        runs.append(source[start:stop] if axis == 0 else source[:, start:stop])
    return runs[0] if folds == 1 else torch.cat(runs, dim=axis)


def _source_shape(source: Any) -> tuple[int, ...]:
    """Shape of a tensor or of a handle of safetensors."""
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def _source_dtype(source: Any) -> torch.dtype:
    if isinstance(source, Tensor):
        return source.dtype
    empty: Tensor = source[0:0]
    return empty.dtype


def _without_prediction_layers(
    named: Mapping[str, Any], architecture: Architecture
) -> Mapping[str, Any]:
    """Drop the layers of multi-token prediction that the configuration states: as in transformers,
    they are no part of the model that is trained."""
    first = architecture.num_hidden_layers
    layers = range(first, first + architecture.prediction_layers)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    if not prefixes:
        return named
    return {name: named[name] for name in named if not name.startswith(prefixes)}


def _without_tied_head(named: Mapping[str, Any], wanted: set[str]) -> Mapping[str, Any]:
    """Drop a stored lm_head that only repeats the tied embedding; one that differs is refused."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in named or head in wanted or embedding not in named:
        return named
    if torch.equal(named[head][:], named[embedding][:]):
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


_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def _compare(
    placement: Placement, named: Mapping[str, Any], converted: tuple[torch.dtype, ...]
) -> None:
    wanted = {tensor.name: tensor for tensor in placement.tensors}
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
    for name, tensor in wanted.items():
        shape, dtype = _source_shape(named[name]), _source_dtype(named[name])
        fits = dtype == tensor.dtype or (dtype in converted and tensor.dtype in converted)
        if shape != tensor.shape or not fits:
            raise InvalidArgument(
                explain(
                    "loading weights",
                    on=name,
                    expected=f"{tensor.shape} {tensor.dtype}",
                    found=f"{shape} {dtype}",
                    do="convert the checkpoint to float32 first"
                    if not fits
                    else "check that the weights and config.json belong together",
                )
            )


def _first(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:3])} and {len(names) - 3} more"
