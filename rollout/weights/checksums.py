"""The checksums that SGLang's `/weights_checker` gives, computed from the published tensors.

On the CPU SGLang 0.5.23 hashes a parameter with SHA-256 and keeps the first 8 bytes
(managers/mm_utils.py, tensor_hash). On CUDA a Triton kernel mixes its 32-bit words, each with its
position, in tiles that are added up (kernels/ops/memory/gpu_tensor_hash.py); what it computes is
written here for tensors of any device. Both have 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollout.weights.parameters import Piece, Zeros
from rollout.weights.staged import bytes_of

__all__ = ["ALGORITHMS", "mixed_words", "parameter_checksum", "sha256_prefix"]

_WORDS_A_TILE = 8192
_TILES_AT_ONCE = {"cpu": 8, "cuda": 2048}
"""So that a CPU's caches hold what is computed on, and a GPU has enough to do."""
_SEED = 0x243F6A88
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK_32)


def parameter_checksum(
    pieces: Sequence[Piece | Zeros], tensors: Mapping[str, Tensor], algorithm: str
) -> str:
    """16 hexadecimal digits; `algorithm` is one of ALGORITHMS."""
    return ALGORITHMS[algorithm]([_bytes(piece, tensors[piece.name]) for piece in pieces])


def _bytes(piece: Piece | Zeros, tensor: Tensor) -> Tensor:
    if isinstance(piece, Zeros):
        return bytes_of(torch.zeros((piece.rows, *tensor.shape[1:]), dtype=tensor.dtype))
    if tensor.ndim == 0:
        return bytes_of(tensor)
    return bytes_of(tensor.narrow(piece.axis, piece.start, piece.stop - piece.start).contiguous())


def sha256_prefix(parts: Sequence[Tensor]) -> str:
    """The first 64 bits of SHA-256 over the bytes of the parts (uint8) one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()[:16]


def mixed_words(parts: Sequence[Tensor]) -> str:
    """What SGLang's kernel computes over the bytes of the parts (uint8) one after the other.

    On a GPU where this process has one: some thirty operations on each word.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = torch.cat([part.to(device) for part in parts])
    missing = -whole.numel() % 4
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing)])
    words = whole.view(torch.int32)
    count = words.numel()
    if count == 0:
        return f"{0:016x}"
    step = _WORDS_A_TILE * _TILES_AT_ONCE[device]
    offsets = torch.arange(min(step, count), dtype=torch.int32, device=device)
    total = 0
    for first in range(0, count, step):
        part = words[first : first + step]
        index = offsets[: part.numel()] + _signed(first & _MASK_32)
        halves = []
        for seed, factor, turn in zip(_SEEDS, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
            mixed = _mix_(_position(index, factor, seed, turn).bitwise_xor_(part))
            rest = mixed.numel() % _WORDS_A_TILE
            tiles = [mixed[: mixed.numel() - rest].view(-1, _WORDS_A_TILE).sum(dim=1)]
            if rest:
                tiles.append(mixed[-rest:].sum(dtype=torch.int64).reshape(1))
            # Sums of signed words have the low 32 bits of sums of unsigned ones.
            summed = _wrapped(torch.cat(tiles)) ^ _signed(count * 4 & _MASK_32)
            halves.append((_mix_(summed).to(torch.int64) & _MASK_32).tolist())
        total += sum((high << 32) + low for high, low in zip(*halves, strict=True))
    return f"{_splitmix(total & _MASK_64):016x}"


def _position(index: Tensor, factor: int, seed: int, turn: int) -> Tensor:
    """What a word's number adds to it."""
    turned = index << turn
    turned.bitwise_or_(_shifted(index, 32 - turn))
    return (index * factor).add_(_signed(seed)).bitwise_xor_(turned)


def _signed(value: int) -> int:
    """The 32-bit integer with these bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _wrapped(values: Tensor) -> Tensor:
    """int64 to int32 with the low 32 bits."""
    low = values & _MASK_32
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _shifted(words: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros, not the sign."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _mix_(words: Tensor) -> Tensor:
    """MurmurHash3's finaliser of 32 bits (Austin Appleby, public domain), in place."""
    words.bitwise_xor_(_shifted(words, 16)).mul_(_signed(0x85EBCA6B))
    words.bitwise_xor_(_shifted(words, 13)).mul_(_signed(0xC2B2AE35))
    return words.bitwise_xor_(_shifted(words, 16))


def _splitmix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _MASK_64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _MASK_64
    return value ^ value >> 31


ALGORITHMS = {"sha256": sha256_prefix, "mixed words": mixed_words}
"""Of a CPU engine, and of one on CUDA."""
