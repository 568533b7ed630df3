"""Advantage estimators: rewards in, one advantage a response token out. Numpy, float64 inside.

Rewards are grouped by the key `group_index`, never by the shape of the batch, so uneven groups are
right. A rollout counts once in its group, however many samples (sibling segments) it yields. Its
advantage goes to every token of every one of them where the loss mask is 1; elsewhere it is 0.

| name | advantage of a rollout | known elsewhere as |
|---|---|---|
| `grpo` | (r − μ) / (σ + 1e-6), σ with n − 1 | slime, Miles, verl `grpo` (TRL adds 1e-4) |
| `rloo` | r − mean of the others = n/(n − 1) · (r − μ) | verl, OpenRLHF, TRL `rloo` |
| `mean_baseline` | r − μ | `grpo` without std normalisation here and in slime and verl; \
the advantage (not the aggregation) of Dr. GRPO |

A group of one rollout has nothing to compare with: all three give it 0, so it trains nothing. (verl
gives such a rollout its raw reward: its `grpo` takes μ = 0, σ = 1 there.)

With `kl_coef` the reward of a rollout is first lowered by kl_coef · Σ kl over its loss tokens, as
verl and TRL do; slime's `grpo` ignores `kl_coef`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.registry import resolve
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = ["ESTIMATORS", "Estimator", "estimate_advantages", "whiten"]

GRPO_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

Estimator = Callable[[RewardBatch, AlgorithmSettings], npt.NDArray[np.float32]]
"""(rewards, settings) → advantages [N], float32, N the response tokens of the batch, flat."""


def grpo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = (r − μ) / (σ + 1e-6); without the division if not `settings.grpo_std_normalization`.

    σ is the unbiased deviation of the group's rollouts. Shao et al. 2024, "DeepSeekMath", §4.1.2
    (outcome supervision); without division: Liu et al. 2025, "Understanding R1-Zero-Like Training".
    """

    def normalise(rewards_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        centred_G = _centre(rewards_G)
        if not settings.grpo_std_normalization or len(rewards_G) < 2:
            return centred_G
        return centred_G / (_deviation(centred_G) + GRPO_EPSILON)

    return _by_group(batch, settings, normalise)


def rloo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A_i = r_i − mean of r_j, j ≠ i. Ahmadian et al. 2024, "Back to Basics", eq. 8."""

    def leave_one_out(rewards_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        n = len(rewards_G)
        return _centre(rewards_G) * (n / (n - 1) if n > 1 else 1.0)

    return _by_group(batch, settings, leave_one_out)


def mean_baseline(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = r − μ, whatever `grpo_std_normalization` says."""
    return _by_group(batch, settings, _centre)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo, "mean_baseline": mean_baseline}
"""Advantage estimators by the name that `--advantage-estimator` takes."""


def estimate_advantages(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """Advantages [N] float32 by `settings.advantage_estimator`, whitened if the settings say so.

    0 wherever the loss mask is 0. Raises InvalidArgument: unknown estimator; a custom one that
    raised, or returned another shape or dtype, or values that are not finite.
    """
    estimator = resolve(ESTIMATORS, settings.advantage_estimator, setting="--advantage-estimator")
    advantages_N: object = estimator(batch, settings)
    expected = f"a float32 array of shape ({len(batch.loss_mask_N)},), finite"
    if (
        not isinstance(advantages_N, np.ndarray)
        or advantages_N.dtype != np.float32
        or advantages_N.shape != batch.loss_mask_N.shape
    ):
        shape = getattr(advantages_N, "shape", None)
        dtype = getattr(advantages_N, "dtype", type(advantages_N).__name__)
        raise InvalidArgument(
            explain(
                "estimating advantages",
                on=f"--advantage-estimator {settings.advantage_estimator}",
                expected=expected,
                found=f"{dtype}, shape {shape}",
            )
        )
    if not np.isfinite(advantages_N).all():
        raise InvalidArgument(
            explain(
                "estimating advantages",
                on=f"--advantage-estimator {settings.advantage_estimator}",
                expected=expected,
                found=f"{int((~np.isfinite(advantages_N)).sum())} values that are not",
            )
        )
    if settings.normalize_advantages:
        advantages_N = whiten(advantages_N, batch.loss_mask_N)
    return np.where(batch.loss_mask_N > 0, advantages_N, np.float32(0))


def whiten(
    advantages_N: npt.NDArray[np.float32], loss_mask_N: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    """(A − μ) / sqrt(var + 1e-8) over the tokens with mask 1; the others come back as 0.

    The variance is the unbiased one (slime, `utils/distributed_utils.py`). Fewer than two tokens,
    or tokens that are all alike, give 0. Shapes [N] in and out.
    """
    taken = loss_mask_N > 0
    centred = _centre(advantages_N[taken].astype(np.float64))
    out_N = np.zeros(len(advantages_N), np.float32)
    if len(centred) > 1:
        variance = float(np.dot(centred, centred)) / (len(centred) - 1)
        out_N[taken] = centred / math.sqrt(variance + WHITEN_EPSILON)
    return out_N


def _by_group(
    batch: RewardBatch,
    settings: AlgorithmSettings,
    transform: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> npt.NDArray[np.float32]:
    """Apply `transform` to the rewards [G] of each group, one entry a rollout; spread to tokens."""
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    advantages_E = np.zeros(len(rewards_E), np.float64)
    groups_E = batch.rollout_groups
    for group in np.unique(groups_E):
        members = groups_E == group
        advantages_E[members] = transform(rewards_E[members])
    return batch.spread(advantages_E)


def _centre(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """values − their mean; exactly zero where all are alike, which a rounded mean would miss."""
    if len(values) == 0 or values.min() == values.max():
        return np.zeros(len(values), np.float64)
    return np.asarray(values - values.mean(), np.float64)


def _deviation(centred_G: npt.NDArray[np.float64]) -> float:
    return math.sqrt(float(np.square(centred_G).sum()) / (len(centred_G) - 1))
