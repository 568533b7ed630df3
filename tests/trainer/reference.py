"""A second implementation of the algorithms: plain loops in float64, from the formulas alone.

It shares no code with `trainer.algorithms`. Three estimators are here, all of them in
`reference_advantages`, losses in `reference_losses`.
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
