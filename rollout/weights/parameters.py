"""Which slices of the canonical tensors a parameter of an SGLang engine is made of.

An engine keeps what it multiplies with at once in one tensor: queries, keys and values; gate and
up; the experts of a layer. With tensor parallelism each rank has its part of the rows or columns,
and the rows of the vocabulary are filled up with zeros. In memory, each of these is the contiguous
bytes of slices of the canonical tensors, one after the other: that is how they are described here,
and how their checksums are computed without an engine. Read in SGLang 0.5.23: layers/linear.py,
layers/vocab_parallel_embedding.py, layers/moe/fused_moe_triton/layer.py and the models' own files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Piece", "RankPlace", "Zeros", "engine_parameters", "together"]

Shape = tuple[int, ...]
_VOCABULARY_MULTIPLE = 64
"""Rows of embedding and head are filled up to a multiple of this."""
_BY_COLUMN = (".o_proj.weight", ".down_proj.weight")
"""Split along their second axis; their input is what the other projections gave."""
_BY_ROW = (".q_proj.weight", ".q_b_proj.weight", ".kv_b_proj.weight")
"""Split along their first axis, where they stand alone (multi-head latent attention)."""
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True, slots=True)
class Piece:
    """`tensor[start:stop]` along an axis of a canonical tensor."""

    name: str
    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rows of zeros, as wide as a row of the canonical tensor."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one process of an engine stands."""

    tp_rank: int
    tp_size: int
    ep_size: int = 1
    """Parts that the experts are dealt into; tensor parallelism splits what is left."""


def together(name: str, names: Collection[str]) -> list[str]:
    """The tensors that an engine must get in one request with `name`, itself among them.

    SGLang keeps the two projections into the latent space of DeepSeek-V3 apart until it has seen
    both, and only within one request; everything else it takes tensor by tensor.
    """
    for one in _LATENT:
        if f".{one}." in name:
            both = [name.replace(f".{one}.", f".{other}.") for other in _LATENT]
            return [other for other in both if other in names]
    return [name]


def engine_parameters(
    found: Iterable[str], shapes: Mapping[str, Shape], place: RankPlace, config: Mapping[str, Any]
) -> dict[str, list[Piece | Zeros]]:
    """The slices of each of the parameters `found` that a rank names, in the order of its memory.

    `shapes` are those of the canonical tensors, `config` the model's config.json. A parameter that
    is not explained is left out.
    """
    names = set(found)
    made = {}
    for name in sorted(names):
        pieces = _Parameter(name, names, shapes, place, config).pieces()
        if pieces and all(piece.name in shapes for piece in pieces):
            made[name] = pieces
    return made


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    found: set[str]
    shapes: Mapping[str, Shape]
    place: RankPlace
    config: Mapping[str, Any]

    def pieces(self) -> list[Piece | Zeros]:
        name = self.name
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self._vocabulary()
        if ".qkv_proj." in name:
            heads = [name.replace(".qkv_proj.", f".{one}_proj.") for one in "qkv"]
            if any(one not in self.shapes for one in heads):
                return []
            return [self._rows(heads[0]), *(self._key_value_rows(one) for one in heads[1:])]
        if ".gate_up_proj." in name:
            return self._gate_up()
        if ".fused_qkv_a_proj_with_mqa." in name:
            parts = [name.replace(".fused_qkv_a_proj_with_mqa.", f".{one}.") for one in _LATENT]
            return [self._whole(one) for one in parts if one in self.shapes]
        match = re.fullmatch(r"(.+\.mlp)\.experts\.(w13|w2)_weight", name)
        if match:
            return self._experts(match[1], match[2])
        if name not in self.shapes:
            return []
        if name.endswith(_BY_COLUMN):
            return [self._share(name, 1)]
        return [self._rows(name) if name.endswith(_BY_ROW) else self._whole(name)]

    def _whole(self, name: str) -> Piece:
        return Piece(name, 0, 0, self.shapes[name][0] if self.shapes[name] else 1)

    def _share(self, name: str, axis: int, rank: int | None = None, of: int | None = None) -> Piece:
        """The part of one rank (default: this one's of tensor parallelism)."""
        rank, of = (self.place.tp_rank, self.place.tp_size) if rank is None else (rank, of or 1)
        width = self.shapes[name][axis] // of
        return Piece(name, axis, rank * width, (rank + 1) * width)

    def _rows(self, name: str) -> Piece:
        return self._share(name, 0)

    def _key_value_rows(self, name: str) -> Piece:
        """With fewer heads than ranks, several ranks have the same head."""
        heads = int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])
        if self.place.tp_size < heads:
            return self._rows(name)
        return self._share(name, 0, self.place.tp_rank // (self.place.tp_size // heads), heads)

    def _gate_up(self) -> list[Piece | Zeros]:
        if self.name in self.shapes:  # one tensor in the files too: gate above up
            half = self.shapes[self.name][0] // 2
            width = half // self.place.tp_size
            start = self.place.tp_rank * width
            return [
                Piece(self.name, 0, first + start, first + start + width) for first in (0, half)
            ]
        parts = [self.name.replace(".gate_up_proj.", f".{one}_proj.") for one in ("gate", "up")]
        return [self._rows(one) for one in parts] if set(parts) <= self.shapes.keys() else []

    def _vocabulary(self) -> list[Piece | Zeros]:
        name = self.name if self.name in self.shapes else "model.embed_tokens.weight"
        if name not in self.shapes:
            return []
        rows, ranks = self.shapes[name][0], self.place.tp_size
        multiple = _VOCABULARY_MULTIPLE
        if -(-rows // multiple) * multiple % ranks:
            multiple *= ranks
        width = -(-rows // multiple) * multiple // ranks
        start = min(self.place.tp_rank * width, rows)
        stop = min(start + width, rows)
        made: list[Piece | Zeros] = [Piece(name, 0, start, stop)] if stop > start else []
        return [*made, Zeros(name, width - (stop - start))] if stop - start < width else made

    def _experts(self, prefix: str, kind: str) -> list[Piece | Zeros]:
        ranks = self.place.tp_size // self.place.ep_size
        part, rank = divmod(self.place.tp_rank, ranks)
        pattern = re.compile(re.escape(f"{prefix}.experts.") + r"(\d+)\.gate_proj\.weight")
        count = sum(1 for name in self.shapes if pattern.fullmatch(name))
        local = count // self.place.ep_size
        experts = [
            f"{prefix}.experts.{number}" for number in range(part * local, part * local + local)
        ]
        shared = f"{prefix}.shared_experts"
        if f"{shared}.gate_proj.weight" in self.shapes and not any(
            name.startswith(f"{shared}.") for name in self.found
        ):
            experts.append(shared)  # the engine keeps it as one more expert
        if kind == "w2":
            return [self._share(f"{one}.down_proj.weight", 1, rank, ranks) for one in experts]
        return [
            self._share(f"{one}.{half}_proj.weight", 0, rank, ranks)
            for one in experts
            for half in ("gate", "up")
        ]
