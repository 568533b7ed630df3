"""Choosing a token as a function of (seed, position), whatever else is in the batch.

Each (seed, position) names one uniform number, made by the counter-based generator Philox4x32-10
(Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and
known answers from its reference implementation, Random123). The number picks a token by inversion
of the cumulative distribution in float64. No state: nothing has to be saved, restored or ordered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain

__all__ = ["kept_tokens", "philox4x32", "sample_tokens", "uniforms"]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: [N, 4] counters and [N, 2] keys, 32 bits in each entry, to [N, 4] outputs."""
    c0, c1, c2, c3 = (counters[:, i] for i in range(4))
    k0, k1 = keys[:, 0], keys[:, 1]
    for _ in range(10):
        # 32 × 32 bits fit in 64: nothing overflows.
        low_high0, low_high1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (low_high1 >> _32) ^ c1 ^ k0,
            low_high1 & _LOW,
            (low_high0 >> _32) ^ c3 ^ k1,
            low_high0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """[N] numbers in [0, 1), multiples of 2**-53, one for each non-negative (seed, position)."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    zero = np.zeros_like(position)
    out = philox4x32(
        np.stack([position & _LOW, position >> _32, zero, zero], axis=1),
        np.stack([seed & _LOW, seed >> _32], axis=1),
    )
    bits = (out[:, 0] << np.uint64(21)) | (out[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def _truncate(weights_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Zero the weights outside top-k, then outside the nucleus. Ties go to the lower token id."""
    sorted_BV, order_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
    if 0 < top_k < sorted_BV.shape[-1]:
        sorted_BV[:, top_k:] = 0
    if top_p < 1:
        mass_BV = sorted_BV.cumsum(-1)
        before_BV = mass_BV - sorted_BV
        # A token stays where the mass before it has not reached top_p: the first always does.
        sorted_BV[before_BV >= top_p * mass_BV[:, -1:]] = 0
    return torch.zeros_like(weights_BV).scatter_(-1, order_BV, sorted_BV)


def _weights(logits_BV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """[B, V] float64: e^((logit − largest) / temperature), 0 where top-p or top-k cut."""
    top_B1 = logits_BV.double().max(dim=-1, keepdim=True).values
    weights_BV = ((logits_BV.double() - top_B1) / temperature).exp()
    if top_p < 1 or top_k > 0:
        weights_BV = _truncate(weights_BV, top_p, top_k)
    return weights_BV


def kept_tokens(logits_BV: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """[B, V] bool: the ids that `sample_tokens` can choose with these parameters.

    `temperature` is above 0.
    """
    return _weights(logits_BV, temperature, top_p, top_k) > 0


def sample_tokens(
    logits_BV: Tensor,
    seeds: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
) -> Tensor:
    """Choose one token a row: [B, V] logits, [B] seeds, [B] positions to [B] int64 ids.

    A row's choice depends on that row's logits, seed and position alone. `temperature` 0 takes the
    largest logit, the lowest id among equals.

    Raises:
        InvalidArgument: a row has NaN or no finite logit, so there is no distribution.
    """
    top_B = logits_BV.max(dim=-1).values
    if not bool(torch.isfinite(top_B).all()):
        row = int((~torch.isfinite(top_B)).nonzero()[0, 0])
        raise InvalidArgument(
            explain(
                "sampling a token",
                on=f"row {row} of the batch",
                expected="finite logits",
                found=f"a largest logit of {float(top_B[row])}",
                do="the weights are broken (training diverged?): go back to an earlier version",
            )
        )
    if temperature == 0:
        # argmax may return any of several equal maxima; the lowest id is a promise.
        return (logits_BV == top_B[:, None]).to(torch.uint8).argmax(dim=-1)
    weights_BV = _weights(logits_BV, temperature, top_p, top_k)
    mass_BV = weights_BV.cumsum(-1)
    total_B1 = mass_BV[:, -1:]
    u_B1 = torch.from_numpy(uniforms(seeds, positions)).to(mass_BV.device)[:, None]
    # u < 1, but u * total can round up to total, which no token's mass exceeds.
    target_B1 = torch.minimum(
        u_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    # The first token whose mass exceeds the target: never one of weight zero.
    return torch.searchsorted(mass_BV, target_B1, right=True)[:, 0]
