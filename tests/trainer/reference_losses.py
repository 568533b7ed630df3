"""A second implementation of losses, aggregation and corrections: numpy float64, loops, formulas.

It shares no code with `trainer.algorithms`. A token is (log_prob, old, rollout, advantage, mask), a
sample a list of tokens. Where a formula stops the gradient, the loss is taken at `frozen` log-probs
there, so that finite differences see what a gradient sees. `Edges` collects how near a decision was
to its threshold: there float32 may decide otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Token(NamedTuple):
    log_prob: float
    old: float
    rollout: float
    advantage: float
    mask: bool


Samples = Sequence[Sequence[Token]]


@dataclass
class Edges:
    nearest: float = math.inf
    seen: list[float] = field(default_factory=list)

    def above(self, value: float, threshold: float) -> bool:
        self.nearest = min(self.nearest, abs(value - threshold))
        return value > threshold


def losses(name: str, samples: Samples, s: Any, frozen: Samples | None, edges: Edges) -> np.ndarray:
    """The loss of each token, one sample after the other; 0 where the mask is False."""
    frozen = samples if frozen is None else frozen
    high = s.eps_clip if s.eps_clip_high is None else s.eps_clip_high
    if name in ("clip_cov", "kl_cov"):
        return _covariance(name, samples, frozen, s, high, edges)
    out = []
    for sample, still in zip(samples, frozen, strict=True):
        kept = [t for t in sample if t.mask]
        kept_still = [t for t in still if t.mask]
        for token, fixed in zip(sample, still, strict=True):
            if not token.mask:
                out.append(0.0)
                continue
            a = token.advantage
            ratio = math.exp(token.log_prob - token.old)
            fixed_ratio = math.exp(fixed.log_prob - fixed.old)
            if name in ("ppo_clip", "vanilla"):
                out.append(_surrogate(ratio, a, s.eps_clip, high, s.eps_clip_c))
            elif name == "gspo":
                mean = sum(t.log_prob - t.old for t in kept) / len(kept)
                out.append(_surrogate(math.exp(mean), a, s.eps_clip, high, s.eps_clip_c))
            elif name in ("gmpo", "geo_mean"):
                total = 0.0
                for t in kept:
                    x = t.log_prob - t.old
                    y = min(max(x, -s.eps_clip), high)
                    total += (
                        0.0 if t.advantage == 0 else min(x, y) if t.advantage > 0 else max(x, y)
                    )
                mean_a = sum(t.advantage for t in kept) / len(kept)
                out.append(-mean_a * math.exp(total / len(kept)))
            elif name == "sapo":
                tau = s.tau_pos if a > 0 else s.tau_neg
                out.append(-a * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
            elif name == "cispo":
                floor = 1 - s.eps_clip if s.cispo_form == "slime" else 0.0
                out.append(-min(max(fixed_ratio, floor), 1 + high) * a * token.log_prob)
            elif name in ("dppo_tv", "dppo_kl"):
                p, q = math.exp(fixed.old), math.exp(fixed.log_prob)
                if name == "dppo_tv":
                    up, down = edges.above(q - p, high), edges.above(p - q, s.eps_clip)
                else:
                    d = p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
                    up = q > p and edges.above(d, high)
                    down = q < p and edges.above(d, s.eps_clip)
                gone = up if a > 0 else down
                c = 20.0 if s.eps_clip_c is None else s.eps_clip_c
                out.append(0.0 if gone else -min(fixed_ratio, c) * a * token.log_prob)
            elif name in ("reinforce", "gpg"):
                out.append(-a * token.log_prob)
            elif name == "vespo":
                log_w = sum(t.log_prob - t.old for t in kept_still)
                log_w = min(max(log_w, math.log(1e-8)), 20.0)
                k, lam = (
                    (s.vespo_k_pos, s.vespo_lambda_pos)
                    if a >= 0
                    else (s.vespo_k_neg, s.vespo_lambda_neg)
                )
                phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
                out.append(-phi * a * token.log_prob)
            else:
                raise KeyError(name)
    return np.array(out, np.float64)


def _surrogate(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    loss = max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def _covariance(
    name: str, samples: Samples, frozen: Samples, s: Any, high: float, edges: Edges
) -> np.ndarray:
    flat = [t for sample in samples for t in sample]
    still = [t for sample in frozen for t in sample]
    places = [i for i, t in enumerate(still) if t.mask]
    out = np.zeros(len(flat))
    if not places:
        return out
    mean_a = sum(still[i].advantage for i in places) / len(places)
    mean_l = sum(still[i].log_prob for i in places) / len(places)
    covariance = {i: (still[i].advantage - mean_a) * (still[i].log_prob - mean_l) for i in places}
    for i in places:
        ratio = math.exp(flat[i].log_prob - flat[i].old)
        out[i] = (
            _surrogate(ratio, flat[i].advantage, s.eps_clip, high, None)
            if name == "clip_cov"
            else -ratio * flat[i].advantage
        )
    if name == "kl_cov":
        count = max(1, int(s.kl_cov_ratio * len(places)))
        ranked = sorted(places, key=lambda i: (-covariance[i], i))
        if count < len(ranked):
            edges.above(covariance[ranked[count - 1]], covariance[ranked[count]])
        for i in ranked[:count]:
            out[i] += s.ppo_kl_coef * abs(flat[i].log_prob - flat[i].old)
        return out
    candidates = []
    for i in places:
        ratio, a = math.exp(still[i].log_prob - still[i].old), still[i].advantage
        # Where A is 0 no clip bites; both sides of the comparison are 0.
        above = edges.above(ratio, 1 + high) if a > 0 else False
        below = not edges.above(ratio, 1 - s.eps_clip) if a < 0 else False
        inside = edges.above(covariance[i], s.clip_cov_lb)
        inside = inside and not edges.above(covariance[i], s.clip_cov_ub)
        if inside and not above and not below:
            candidates.append(i)
    count = min(max(1, int(s.clip_cov_ratio * len(places))), len(candidates))
    for number in range(count):
        out[candidates[math.floor((number + 0.5) * len(candidates) / count)]] = 0.0
    return out


def weights(
    aggregation: str, masks: Sequence[Sequence[int]], rollouts: Sequence[int], scale: float | None
) -> np.ndarray:
    """The weight of each token in the loss of the step."""
    out = []
    step_tokens = sum(sum(m) for m in masks)
    for mask, rollout in zip(masks, rollouts, strict=True):
        rollout_tokens = sum(sum(m) for m, r in zip(masks, rollouts, strict=True) if r == rollout)
        for m in mask:
            if not m:
                out.append(0.0)
            elif aggregation == "rollout":
                out.append(1 / rollout_tokens / len(set(rollouts)))
            elif aggregation in ("token", "token-mean", "dapo", "bnpo"):
                out.append(1 / step_tokens)
            elif aggregation == "token-sum":
                out.append(1.0)
            elif aggregation in ("seq-mean-token-mean", "grpo"):
                out.append(1 / sum(mask) / len(masks))
            elif aggregation in ("seq-mean-token-sum", "luspo"):
                out.append(1 / len(masks))
            elif aggregation in ("seq-mean-token-sum-norm", "dr_grpo"):
                assert scale is not None
                out.append(1 / len(masks) / scale)
            else:
                raise KeyError(aggregation)
    return np.array(out)


def correction(name: str, samples: Samples, s: Any, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Weights and keeps of each token; 0 and False where the mask is False."""
    made: list[list[float]] = []
    keeps: list[bool] = []
    for sample in samples:
        kept = [t for t in sample if t.mask]
        xs = [t.old - t.rollout for t in kept]
        row = []
        veto = False
        if name == "mis" and s.mis_veto_threshold is not None:
            for x in xs:
                veto |= not edges.above(math.exp(x), s.mis_veto_threshold)
        for token in sample:
            if not token.mask:
                row.append(0.0)
                keeps.append(False)
                continue
            x, keep = token.old - token.rollout, True
            if name == "tis":
                w = min(max(math.exp(x), s.tis_clip_low), s.tis_clip)
            elif name == "icepop":
                w = math.exp(x)
                if edges.above(w, s.tis_clip) or not edges.above(w, s.tis_clip_low):
                    w = 0.0
            else:
                upper = s.mis_upper_bound
                lower = 1 / upper if s.mis_lower_bound is None else s.mis_lower_bound
                if s.mis_level != "token":
                    x = sum(xs) / (len(xs) if s.mis_level == "geometric" else 1)
                w = math.exp(min(max(x, -20.0), 20.0))
                if s.mis_mode == "mask":
                    keep = not edges.above(w, upper) and edges.above(w, lower)
                elif s.mis_mode == "clip":
                    w = min(max(w, lower), upper)
                else:
                    w = min(w, upper)
                keep = keep and not veto
            row.append(w)
            keeps.append(keep)
        made.append(row)
    if name == "mis" and s.mis_batch_normalize:
        if s.mis_level == "token":
            taken = [
                w
                for r, sample in zip(made, samples, strict=True)
                for w, t in zip(r, sample, strict=True)
                if t.mask
            ]
        else:
            taken = [
                next(w for w, t in zip(r, sample, strict=True) if t.mask)
                for r, sample in zip(made, samples, strict=True)
                if any(t.mask for t in sample)
            ]
        mean = sum(taken) / len(taken) if taken else 0.0
        if edges.above(mean, 1e-8):
            made = [[w / mean for w in row] for row in made]
    return np.array([w for row in made for w in row]), np.array(keeps, bool)


def opsm_keeps(samples: Samples, s: Any, edges: Edges) -> np.ndarray:
    """False where OPSM takes the policy loss of a token away."""
    out = []
    for sample in samples:
        moved = [t.old - t.log_prob for t in sample if t.mask]
        far = bool(moved) and edges.above(sum(moved) / len(moved), s.opsm_delta)
        out += [not (far and t.advantage < 0) for t in sample]
    return np.array(out, bool)


def kl(name: str, log_prob: float, ref: float, old: float | None) -> float:
    """The KL of a token, times the ratio of current to old policy where `old` is given."""
    d = log_prob - ref
    if name == "k1":
        value = d
    elif name == "k2":
        value = d * d / 2
    else:
        bounded = min(max(d, -20.0), 20.0) if name == "low_var_kl" else d
        value = math.exp(-bounded) - 1 + bounded
    if old is not None:
        value *= math.exp(log_prob - old)
    return min(max(value, -10.0), 10.0) if name == "low_var_kl" else value
