"""MurmurHash3_x86_32, vectorised over 64-bit integers that hold 32 bits each.

By Austin Appleby, placed in the public domain (SMHasher, MurmurHash3.cpp). SGLang's Triton kernel
hashes 16 bytes with seed 0: low and high word of the sampling seed, position, vocabulary column.
`tests/sglang/test_stand_ins.py` compares this with known answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

__all__ = ["murmur3_32_words"]

_LOW = 0xFFFFFFFF


def _times(words: Tensor, factor: int) -> Tensor:
    """Product modulo 2**32. An int64 product wraps modulo 2**64: the low half is right."""
    return (words * factor) & _LOW


def _rotated(words: Tensor, bits: int) -> Tensor:
    return ((words << bits) | (words >> (32 - bits))) & _LOW


def murmur3_32_words(blocks: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Hash of whole 4-byte blocks: int64 tensors in [0, 2**32) that broadcast together, to one."""
    shape = reduce(torch.broadcast_shapes, [block.shape for block in blocks], torch.Size())
    state = torch.full(shape, seed, dtype=torch.int64)
    for block in blocks:
        state = state ^ _times(_rotated(_times(block, 0xCC9E2D51), 15), 0x1B873593)
        state = (_rotated(state, 13) * 5 + 0xE6546B64) & _LOW
    state = state ^ (4 * len(blocks))
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)
