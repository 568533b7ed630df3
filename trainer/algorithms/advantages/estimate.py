"""What an estimator returns, and the arithmetic that several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = [
    "Estimate",
    "Estimator",
    "Floats",
    "centre",
    "deviation",
    "missing",
    "whiten",
    "whitened",
]

WHITEN_EPSILON = 1e-8

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """Advantages, and what a critic would learn. Both 0 wherever the loss mask is 0."""

    advantages_N: npt.NDArray[np.float32]
    """[N] One a response token."""
    returns_N: npt.NDArray[np.float32] | None = None
    """[N] What each token's value should have been; None where the estimator has no such thing."""


Estimator = Callable[[RewardBatch, AlgorithmSettings], npt.NDArray[np.float32] | Estimate]
"""(rewards, settings) → advantages [N], float32, N the response tokens of the batch, flat; alone or
in an `Estimate`."""


def missing(name: str, needs: str, do: str) -> InvalidArgument:
    """The error of an estimator whose input is not there."""
    return InvalidArgument(
        explain(
            "estimating advantages",
            on=f"--advantage-estimator {name}",
            expected=needs,
            found="none",
            do=do,
        )
    )


def centre(values: Floats) -> Floats:
    """values − their mean; exactly zero where all are alike, which a rounded mean would miss."""
    if len(values) == 0 or values.min() == values.max():
        return np.zeros(len(values), np.float64)
    return np.asarray(values - values.mean(), np.float64)


def deviation(centred: Floats, kind: str) -> float:
    """The standard deviation of values whose mean has been taken off; 0 of fewer than two.

    `kind` is "unbiased" (n − 1, as `torch.std`) or "biased" (n).
    """
    n = len(centred) - (kind == "unbiased")
    return math.sqrt(float(np.square(centred).sum()) / n) if len(centred) > 1 else 0.0


def whitened(values: Floats) -> Floats:
    """(x − μ) / sqrt(var + 1e-8), var with n − 1; 0 of fewer than two values, or equal ones."""
    centred = centre(values)
    if len(centred) < 2:
        return centred
    variance = float(np.dot(centred, centred)) / (len(centred) - 1)
    return centred / math.sqrt(variance + WHITEN_EPSILON)


def whiten(
    advantages_N: npt.NDArray[np.float32], loss_mask_N: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    """(A − μ) / sqrt(var + 1e-8) over the tokens with mask 1; the others come back as 0.

    The variance is the unbiased one (slime, `utils/distributed_utils.py`; verl, `masked_whiten`).
    Fewer than two tokens, or tokens that are all alike, give 0. Shapes [N] in and out.
    """
    taken = loss_mask_N > 0
    out_N = np.zeros(len(advantages_N), np.float32)
    out_N[taken] = whitened(advantages_N[taken].astype(np.float64))
    return out_N
