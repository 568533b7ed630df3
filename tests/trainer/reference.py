"""A second implementation of the algorithms: plain loops in float64, from the formulas alone.

It shares no code with `trainer.algorithms`; property tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def estimator(
    name: str, rewards: Sequence[float], groups: Sequence[int], rollouts: Sequence[int]
) -> list[float]:
    """The advantage of each sample."""
    of_rollout: dict[int, tuple[int, float]] = {}
    for reward, group, rollout in zip(rewards, groups, rollouts, strict=True):
        of_rollout[rollout] = (group, reward)
    out = []
    for rollout in rollouts:
        group, reward = of_rollout[rollout]
        peers = [r for g, r in of_rollout.values() if g == group]
        others = [r for other, (g, r) in of_rollout.items() if g == group and other != rollout]
        mean = sum(peers) / len(peers)
        if name == "rloo":
            out.append(reward - sum(others) / len(others) if others else 0.0)
        elif name == "mean_baseline" or len(peers) == 1:
            out.append(reward - mean)
        elif name == "grpo":
            deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
            out.append((reward - mean) / (deviation + 1e-6))
        else:
            raise KeyError(name)
    return out


def whiten(advantages: Sequence[float], mask: Sequence[int]) -> list[float]:
    taken = [a for a, m in zip(advantages, mask, strict=True) if m]
    if len(taken) < 2:
        return [0.0] * len(advantages)
    mean = sum(taken) / len(taken)
    variance = sum((a - mean) ** 2 for a in taken) / (len(taken) - 1)
    return [
        (a - mean) / math.sqrt(variance + 1e-8) if m else 0.0
        for a, m in zip(advantages, mask, strict=True)
    ]


def kl(name: str, log_prob: float, ref_log_prob: float) -> float:
    d = log_prob - ref_log_prob
    if name == "k1":
        return d
    if name == "k2":
        return d**2 / 2
    k3 = math.exp(-d) - 1 + d
    if name == "k3":
        return k3
    return min(10.0, max(-10.0, k3))


def ppo_clip(
    log_prob: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    ratio = math.exp(log_prob - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * advantage, -clipped * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


def aggregate(
    values: Sequence[Sequence[float]],
    masks: Sequence[Sequence[int]],
    rollouts: Sequence[int],
    *,
    per_token: bool,
    global_batch_size: int,
) -> float:
    """The loss of a step, from the values of each sample's response tokens."""
    if per_token:
        total = sum(
            v
            for vs, ms in zip(values, masks, strict=True)
            for v, m in zip(vs, ms, strict=True)
            if m
        )
        count = sum(sum(ms) for ms in masks)
        return total / count if count else 0.0
    loss = 0.0
    for rollout in set(rollouts):
        total, count = 0.0, 0
        for vs, ms, r in zip(values, masks, rollouts, strict=True):
            if r == rollout:
                total += sum(v for v, m in zip(vs, ms, strict=True) if m)
                count += sum(ms)
        if count:
            loss += total / count
    return loss / global_batch_size
