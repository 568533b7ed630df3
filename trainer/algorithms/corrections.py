"""Off-policy corrections: what the loss of a token is multiplied with, and which tokens leave it.

The tokens were sampled by the engine (rollout log-probs), and the ratio of the loss is taken
against the trainer's policy before the rollout's first step (old log-probs): x = old − rollout is
how far these two differ, by numerics, by staleness, or by both. None of this has a gradient.

| `--custom-tis-function-path` | weight, r = e^x | rejected |
|---|---|---|
| none: `tis` | r clamped to [tis_clip_low, tis_clip] | none |
| `icepop` | r within these bounds, else 0 | none |
| `mis` | by `mis_level` and `mis_mode`, see `mis` | mode mask, and the veto |

All are switched on by `--use-tis`. `--use-opsm` stands beside them and looks at the policy in
training. A weight multiplies the policy loss alone; a rejected token leaves the whole loss, entropy
and KL included. Neither changes a denominator: the weights of `aggregate` stay what the loss masks
say (slime: `rollout_mask_sums`), so rejecting half of the tokens halves the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.losses.inputs import LossInputs
from trainer.algorithms.losses.sequences import sequence_mean, sequence_sum
from trainer.algorithms.registry import resolve
from trainer.settings import AlgorithmSettings

__all__ = [
    "CORRECTIONS",
    "Correction",
    "log_weights",
    "off_policy_correction",
    "opsm_keeps",
    "rollout_correction",
]

LOG_RATIO_BOUND = 20.0
SMALLEST_MEAN = 1e-8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Correction:
    """What a correction says of each token."""

    weights_N: torch.Tensor
    """float32 [n], not negative: multiplies the policy loss."""
    keep_N: torch.Tensor
    """bool [n]: False where the token is rejected."""


CorrectionFunction = Callable[[LossInputs, AlgorithmSettings], Correction]


def tis(inputs: LossInputs, settings: AlgorithmSettings) -> Correction:
    """w = clamp(e^(old − rollout), tis_clip_low, tis_clip): truncated importance sampling.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". At
    old − rollout = ln 3 and `tis_clip` 2 the weight is 2.
    """
    ratio_N = torch.exp(_difference(inputs))
    return _kept(inputs, torch.clamp(ratio_N, settings.tis_clip_low, settings.tis_clip))


def icepop(inputs: LossInputs, settings: AlgorithmSettings) -> Correction:
    """w = e^(old − rollout) where it lies in [tis_clip_low, tis_clip], else 0.

    Ling team 2025, "Every Step Evolves"; slime's `icepop_function`. At old − rollout = ln 3 and
    `tis_clip` 2 the weight is 0.
    """
    ratio_N = torch.exp(_difference(inputs))
    within_N = (ratio_N >= settings.tis_clip_low) & (ratio_N <= settings.tis_clip)
    return _kept(inputs, torch.where(within_N, ratio_N, 0.0))


def mis(inputs: LossInputs, settings: AlgorithmSettings) -> Correction:
    """Masked importance sampling, as in slime's example `train_infer_mismatch_helper`.

    The log of the weight is x of the token (`mis_level` token), Σ x of its sample (sequence) or the
    mean (geometric), over loss tokens, bounded to ±20. Then, by `mis_mode`:

    - truncate: at most `mis_upper_bound`;
    - clip: within [`mis_lower_bound`, `mis_upper_bound`];
    - mask: as it is, and the token rejected where it lies outside of these bounds.

    A lower bound that is not set is 1/`mis_upper_bound`. A sample with a token whose own r lies
    below `mis_veto_threshold` is rejected whole. With `mis_batch_normalize` weights are divided by
    their mean over the tokens given here (or over the samples, where each has one weight), rejected
    ones included: give the whole step.
    """
    upper = settings.mis_upper_bound
    lower = 1.0 / upper if settings.mis_lower_bound is None else settings.mis_lower_bound
    weights_N = torch.exp(
        torch.clamp(log_weights(inputs, settings.mis_level), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    )
    keep_N = inputs.mask_N
    if settings.mis_mode == "truncate":
        weights_N = torch.clamp(weights_N, max=upper)
    elif settings.mis_mode == "clip":
        weights_N = torch.clamp(weights_N, lower, upper)
    else:
        keep_N = keep_N & (weights_N >= lower) & (weights_N <= upper)
    if settings.mis_veto_threshold is not None:
        catastrophic_N = inputs.mask_N & (
            _difference(inputs) < math.log(settings.mis_veto_threshold)
        )
        keep_N = keep_N & (sequence_sum(catastrophic_N.float(), inputs) == 0)
    if settings.mis_batch_normalize:
        weights_N = _normalized(weights_N, inputs, by_token=settings.mis_level == "token")
    return Correction(weights_N=torch.where(inputs.mask_N, weights_N, 0.0), keep_N=keep_N)


CORRECTIONS: dict[str, CorrectionFunction] = {"tis": tis, "icepop": icepop, "mis": mis}
"""Corrections by the name that `--custom-tis-function-path` takes."""


def log_weights(inputs: LossInputs, level: str) -> torch.Tensor:
    """[n] Log of the importance weight at 'token', 'sequence' or 'geometric' level, unbounded."""
    difference_N = _difference(inputs)
    if level == "token":
        return difference_N
    reduce = sequence_sum if level == "sequence" else sequence_mean
    return reduce(difference_N, inputs)


def rollout_correction(inputs: LossInputs, settings: AlgorithmSettings) -> Correction | None:
    """The correction that `settings` ask for; None without `--use-tis`.

    It depends on old and rollout log-probs and the mask alone. Raises InvalidArgument: an unknown
    name, or a custom function that raised or returned something else.
    """
    if not settings.use_tis:
        return None
    setting = "--custom-tis-function-path"
    name = correction_name(settings.custom_tis_function_path)
    with torch.no_grad():
        result: object = resolve(CORRECTIONS, name, setting=setting)(inputs, settings)
    shape = inputs.mask_N.shape
    if not isinstance(result, Correction):
        found = type(result).__name__
    elif result.weights_N.shape != shape or result.weights_N.dtype != torch.float32:
        found = f"weights_N: {result.weights_N.dtype}, shape {tuple(result.weights_N.shape)}"
    elif result.keep_N.shape != shape or result.keep_N.dtype != torch.bool:
        found = f"keep_N: {result.keep_N.dtype}, shape {tuple(result.keep_N.shape)}"
    elif result.weights_N.requires_grad:
        found = "weights with a gradient"
    elif not bool(torch.isfinite(result.weights_N).all()):
        found = "weights that are not finite"
    else:
        return result
    raise InvalidArgument(
        explain(
            "correcting for the policy that sampled",
            on=f"{setting} {name}",
            expected=f"a Correction with finite float32 weights_N and bool keep_N, {tuple(shape)}",
            found=found,
        )
    )


def off_policy_correction(
    inputs: LossInputs, settings: AlgorithmSettings, *, known: Correction | None = None
) -> Correction | None:
    """All corrections of a micro-batch together; None where none is on.

    `known` is what `rollout_correction` gave for its tokens, where that was worked out for the
    whole step before.
    """
    found = rollout_correction(inputs, settings) if known is None else known
    if not settings.use_opsm:
        return found
    if found is None:
        found = _kept(inputs, torch.ones_like(inputs.advantages_N))
    keeps_N = opsm_keeps(inputs, settings)
    return Correction(weights_N=torch.where(keeps_N, found.weights_N, 0.0), keep_N=found.keep_N)


def opsm_keeps(inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor:
    """[n] False where off-policy sequence masking takes the policy loss of a token away.

    That is where A < 0 and the mean of old − current log-probs over the sample's loss tokens is
    above `opsm_delta`. DeepSeek-AI 2025, "DeepSeek-V3.2", §3.1; slime's `compute_opsm_mask`.
    """
    with torch.no_grad():
        moved_N = inputs.old_log_probs_N - inputs.log_probs_N
        far_N = sequence_mean(moved_N, inputs) > settings.opsm_delta
        return ~((inputs.advantages_N < 0) & far_N)


def _difference(inputs: LossInputs) -> torch.Tensor:
    """[n] x = old − rollout; 0 where the token is in no loss."""
    difference_N = inputs.old_log_probs_N - inputs.rollout_log_probs_N
    return torch.where(inputs.mask_N, difference_N, 0.0)


def _kept(inputs: LossInputs, weights_N: torch.Tensor) -> Correction:
    return Correction(
        weights_N=torch.where(inputs.mask_N, weights_N, 0.0), keep_N=inputs.mask_N.clone()
    )


def _normalized(weights_N: torch.Tensor, inputs: LossInputs, *, by_token: bool) -> torch.Tensor:
    """Weights over their mean; as they are where that is next to nothing."""
    shares_N = inputs.mask_N.double()
    if not by_token:
        shares_N = shares_N / torch.clamp(sequence_sum(shares_N, inputs), min=1.0)
    mean = float((shares_N * weights_N.double()).sum() / torch.clamp(shares_N.sum(), min=1.0))
    return weights_N / mean if mean > SMALLEST_MEAN else weights_N
