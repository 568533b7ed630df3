"""Metrics of the off-policy corrections of a step, under slime's names.

Fractions and means are over the loss tokens of the whole step, rejected ones included: taken after
rejection they would show nothing. Float64; NaN where no token is in the loss.
"""

from __future__ import annotations

import math

import torch

from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.corrections import LOG_RATIO_BOUND, log_weights, opsm_keeps
from trainer.algorithms.losses.inputs import LossInputs
from trainer.settings import AlgorithmSettings

__all__ = ["correction_metrics"]


def correction_metrics(
    inputs: LossInputs, settings: AlgorithmSettings, weights_N: torch.Tensor
) -> dict[str, float]:
    """What the corrections did to a step; empty where none is on.

    `inputs` are those of the whole step, and `weights_N` [N] what multiplied the policy loss of
    each token, 0 where it was rejected.

    - always: `correction_weight_mean`, and `correction_zero_fraction`, weights that are 0;
    - `tis`, `tis_abs`, `tis_clipfrac` (TIS, IcePop): mean of r = e^(old − rollout), mean of
      |r − 1|, and the share of tokens whose r lies outside of the bounds;
    - `mis_mean_is_weight_before_clip`, and by mode `mis_truncate_fraction`,
      `mis_clip_fraction_low`, `_high`, `mis_mask_fraction_low`, `_high`;
    - with a veto: `mis_catastrophic_token_fraction`, `mis_catastrophic_seq_fraction` (of the
      samples with a loss token);
    - `opsm_clipfrac`: loss tokens that OPSM took out.
    """
    if not (settings.use_tis or settings.use_opsm):
        return {}
    with torch.no_grad():
        metrics = {
            "correction_weight_mean": _mean(weights_N, inputs),
            "correction_zero_fraction": _mean(weights_N == 0, inputs),
        }
        if settings.use_tis:
            name = correction_name(settings.custom_tis_function_path)
            if name in ("tis", "icepop"):
                metrics |= _tis(inputs, settings)
            elif name == "mis":
                metrics |= _mis(inputs, settings)
        if settings.use_opsm:
            metrics["opsm_clipfrac"] = _mean(~opsm_keeps(inputs, settings), inputs)
    return metrics


def _tis(inputs: LossInputs, settings: AlgorithmSettings) -> dict[str, float]:
    ratio_N = torch.exp(log_weights(inputs, "token"))
    outside_N = (ratio_N < settings.tis_clip_low) | (ratio_N > settings.tis_clip)
    return {
        "tis": _mean(ratio_N, inputs),
        "tis_abs": _mean((ratio_N - 1.0).abs(), inputs),
        "tis_clipfrac": _mean(outside_N, inputs),
    }


def _mis(inputs: LossInputs, settings: AlgorithmSettings) -> dict[str, float]:
    upper = settings.mis_upper_bound
    lower = 1.0 / upper if settings.mis_lower_bound is None else settings.mis_lower_bound
    log_weights_N = log_weights(inputs, settings.mis_level)
    weights_N = torch.exp(torch.clamp(log_weights_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    metrics = {"mis_mean_is_weight_before_clip": _mean(weights_N, inputs)}
    if settings.mis_mode == "truncate":
        metrics["mis_truncate_fraction"] = _mean(weights_N > upper, inputs)
    else:
        metrics[f"mis_{settings.mis_mode}_fraction_low"] = _mean(weights_N < lower, inputs)
        metrics[f"mis_{settings.mis_mode}_fraction_high"] = _mean(weights_N > upper, inputs)
    if settings.mis_veto_threshold is not None:
        bad_N = log_weights(inputs, "token") < math.log(settings.mis_veto_threshold)
        samples = torch.unique(inputs.sequence_N[inputs.mask_N])
        vetoed = torch.unique(inputs.sequence_N[inputs.mask_N & bad_N])
        metrics["mis_catastrophic_token_fraction"] = _mean(bad_N, inputs)
        metrics["mis_catastrophic_seq_fraction"] = (
            len(vetoed) / len(samples) if len(samples) else math.nan
        )
    return metrics


def _mean(values_N: torch.Tensor, inputs: LossInputs) -> float:
    return float(values_N[inputs.mask_N].double().mean())
