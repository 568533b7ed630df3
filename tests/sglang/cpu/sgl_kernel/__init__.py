"""Stand-in for SGLang's compiled kernels, for tests on a CPU: two helpers, nothing else.

SGLang on a CPU without AMX asks `sgl_kernel` for two things only: writing cache slots of new tokens
into the table of a batch, and the hash that `--enable-deterministic-inference` draws its noise
from. Any other kernel is a mistake here and raises where it is *called* (SGLang imports names
that it never reaches). `convert_weight_packed` is not registered, which is how SGLang finds out
that there is no AMX and takes its torch-native layers.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from sgl_kernel.murmur import murmur3_32_words

__version__ = "0.0.0+cpu.stand.in"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def assign_req_to_token_pool_cpu(
    rows_B: Tensor,
    table: Tensor,
    starts_B: Tensor,
    ends_B: Tensor,
    slots: Tensor,
    _table_width: int,
) -> None:
    """Write `slots` [sum(ends − starts)], one request after another, into table[row, start:end]."""
    lengths = (ends_B - starts_B).tolist()
    for row, start, end, part in zip(
        rows_B.tolist(), starts_B.tolist(), ends_B.tolist(), slots.split(lengths), strict=True
    ):
        table[row, start:end] = part.to(table.dtype)


def _murmur_hash32_cpu(seeds_B: Tensor, positions_B: Tensor, columns_V: Tensor) -> Tensor:
    """[B, V] uint32: a hash of each (64-bit seed, 32-bit position, 32-bit column), as Triton's."""
    low = 0xFFFFFFFF
    seeds_B1 = seeds_B.view(torch.int64)[:, None]
    return murmur3_32_words(
        [
            seeds_B1 & low,
            (seeds_B1 >> 32) & low,
            positions_B.to(torch.int64)[:, None] & low,
            columns_V.to(torch.int64)[None, :] & low,
        ]
    ).to(torch.uint32)


_library.impl("murmur_hash32_cpu", _murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_arguments: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but tests/sglang/cpu stands in for sgl_kernel here "
            "and has no such kernel: what needs it cannot be tested on a CPU"
        )

    return kernel
