"""Estimators by name, and what is done with what they return."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.advantages import distillation, gdpo, groups, returns
from trainer.algorithms.advantages.estimate import Estimate, Estimator, whiten
from trainer.algorithms.registry import resolve
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = ["ESTIMATORS", "estimate", "estimate_advantages"]

ESTIMATORS: dict[str, Estimator] = {
    "dr_grpo": groups.dr_grpo,
    "gdpo": gdpo.gdpo,
    "gpg": groups.gpg,
    "group_norm": groups.group_norm,
    "grpo": groups.grpo,
    "maxrl": groups.maxrl,
    "mean_baseline": groups.mean_baseline,
    "on_policy_distillation": distillation.on_policy_distillation,
    "opo": groups.opo,
    "pass_at_k": groups.pass_at_k,
    "ppo": returns.ppo,
    "reinforce": returns.reinforce,
    "reinforce_plus_plus": returns.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": returns.reinforce_plus_plus_baseline,
    "remax": returns.remax,
    "rloo": groups.rloo,
}
"""Advantage estimators by the name that `--advantage-estimator` takes."""


def estimate(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """Advantages and returns by `settings.advantage_estimator`.

    With `use_opd` the teacher's term is added to the advantages; with `normalize_advantages` they
    are whitened over the loss tokens after that (slime's order). Both arrays are 0 wherever the
    loss mask is 0.

    Raises InvalidArgument: unknown estimator, one that lacks an input; a custom one that raised, or
    returned another shape or dtype, or values that are not finite.
    """
    estimator = resolve(ESTIMATORS, settings.advantage_estimator, setting="--advantage-estimator")
    result: object = estimator(batch, settings)
    if not isinstance(result, Estimate):
        result = Estimate(advantages_N=result)  # type: ignore[arg-type]  # checked next
    advantages_N = _checked(batch, settings, "advantages", result.advantages_N)
    returns_N = None
    if result.returns_N is not None:
        returns_N = _checked(batch, settings, "returns", result.returns_N)
    if settings.use_opd:
        term_N = distillation.teacher_term(batch, settings)
        advantages_N = (advantages_N.astype(np.float64) + term_N).astype(np.float32)
        advantages_N = _checked(batch, settings, "advantages with the teacher's term", advantages_N)
    if settings.normalize_advantages:
        advantages_N = whiten(advantages_N, batch.loss_mask_N)
    return Estimate(advantages_N=advantages_N, returns_N=returns_N)


def estimate_advantages(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """The advantages [N] of `estimate`."""
    return estimate(batch, settings).advantages_N


def _checked(
    batch: RewardBatch, settings: AlgorithmSettings, what: str, values_N: object
) -> npt.NDArray[np.float32]:
    """`values_N` with 0 wherever the loss mask is 0."""
    expected = f"{what}: a float32 array of shape ({len(batch.loss_mask_N)},), finite"
    found = None
    if (
        not isinstance(values_N, np.ndarray)
        or values_N.dtype != np.float32
        or values_N.shape != batch.loss_mask_N.shape
    ):
        shape = getattr(values_N, "shape", None)
        found = f"{getattr(values_N, 'dtype', type(values_N).__name__)}, shape {shape}"
    elif not np.isfinite(values_N).all():
        found = f"{int((~np.isfinite(values_N)).sum())} values that are not"
    if found is not None:
        raise InvalidArgument(
            explain(
                "estimating advantages",
                on=f"--advantage-estimator {settings.advantage_estimator}",
                expected=expected,
                found=found,
            )
        )
    return np.where(batch.taken_N, cast(npt.NDArray[np.float32], values_N), np.float32(0))
