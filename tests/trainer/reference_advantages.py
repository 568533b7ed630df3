"""A second implementation of the advantage estimators: plain loops in float64, by the formulas.

It shares no code with `trainer.algorithms`. A `Story` is the step as loops like to see it: a list
of samples, each with its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Token:
    mask: int
    kl: float = 0.0
    log_prob: float = 0.0
    teacher: float = 0.0
    value: float = 0.0


@dataclass
class Sample:
    rollout: int
    group: int
    reward: float
    tokens: list[Token] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    greedy: float = 0.0

    @property
    def length(self) -> int:
        return sum(token.mask for token in self.tokens)


@dataclass
class Options:
    """Settings by the names of `AlgorithmSettings`."""

    grpo_std_normalization: bool = True
    advantage_deviation: str = "unbiased"
    advantage_epsilon: float | None = None
    use_leave_one_out_baseline: bool = False
    grpo_std_scope: str = "group"
    single_sample_advantage: str = "zero"
    exclude_masked_rollouts: bool = False
    estimator_whitening: bool = True
    gamma: float = 1.0
    lambd: float = 1.0
    discount_masked_tokens: bool = False
    gdpo_reward_keys: tuple[str, ...] = ()
    gdpo_reward_weights: tuple[float, ...] = ()
    gdpo_whitening: str = "rollout"
    kl_coef: float = 0.0
    opd_kl_coef: float = 1.0


def advantages(name: str, story: list[Sample], options: Options) -> list[list[float]]:
    """Advantages of each sample's tokens; 0 where the mask is 0."""
    if name in ("reinforce", "reinforce_plus_plus", "remax", "ppo"):
        out = [_token_level(name, sample, options) for sample in story]
        if name == "reinforce_plus_plus" and options.estimator_whitening:
            out = whiten_tokens(story, out)
    elif name == "reinforce_plus_plus_baseline":
        by_rollout = _group_level("mean_baseline", story, options, kl_coef=0.0)
        out = [
            [by_rollout[s.rollout] - options.kl_coef * t.kl if t.mask else 0.0 for t in s.tokens]
            for s in story
        ]
        if options.estimator_whitening:
            out = whiten_tokens(story, out)
    elif name == "on_policy_distillation":
        out = [
            [options.opd_kl_coef * (t.teacher - t.log_prob) if t.mask else 0.0 for t in s.tokens]
            for s in story
        ]
    elif name == "gdpo":
        return _gdpo(story, options)
    else:
        by_rollout = _group_level(name, story, options, kl_coef=options.kl_coef)
        out = [[by_rollout[s.rollout] for _ in s.tokens] for s in story]
    return [
        [a if t.mask else 0.0 for a, t in zip(row, s.tokens, strict=True)]
        for row, s in zip(out, story, strict=True)
    ]


def whiten_tokens(story: list[Sample], rows: list[list[float]]) -> list[list[float]]:
    taken = [
        a
        for row, s in zip(rows, story, strict=True)
        for a, t in zip(row, s.tokens, strict=True)
        if t.mask
    ]
    white = iter(_whiten(taken))
    return [[next(white) if t.mask else 0.0 for t in s.tokens] for s in story]


def _whiten(values: list[float]) -> list[float]:
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def _std(values: list[float], kind: str) -> float:
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    divisor = len(values) - 1 if kind == "unbiased" else len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / divisor)


def _mean(values: list[float]) -> float:
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _group_level(
    name: str,
    story: list[Sample],
    options: Options,
    *,
    kl_coef: float,
    rewards: dict[int, float] | None = None,
) -> dict[int, float]:
    """Rollout → advantage."""
    length: dict[int, int] = {}
    group: dict[int, int] = {}
    reward: dict[int, float] = {}
    for s in story:
        length[s.rollout] = length.get(s.rollout, 0) + s.length
        group[s.rollout] = s.group
        reward[s.rollout] = s.reward
    if rewards is not None:
        reward = rewards
    for s in story:
        for t in s.tokens:
            if t.mask and kl_coef:
                reward[s.rollout] -= kl_coef * t.kl
    counted = [r for r in reward if length[r] > 0 or not options.exclude_masked_rollouts]
    out = dict.fromkeys(reward, 0.0)
    for r in counted:
        peers = [p for p in counted if group[p] == group[r]]
        out[r] = _one(name, r, peers, counted, reward, length, options)
    return out


def _one(
    name: str,
    mine: int,
    peers: list[int],
    everyone: list[int],
    reward: dict[int, float],
    length: dict[int, int],
    options: Options,
) -> float:
    kind = options.advantage_deviation
    epsilon = options.advantage_epsilon
    default = {"group_norm": 1e-9}.get(name, 1e-6)
    epsilon = default if epsilon is None else epsilon
    r = reward[mine]
    values = [reward[p] for p in peers]
    others = [reward[p] for p in peers if p != mine]
    scale = 1.0
    if name == "gpg":
        nonzero = sum(1 for e in everyone if reward[e] != 0)
        scale = len(everyone) / max(nonzero, 1)
    divides = options.grpo_std_normalization and name == "grpo"
    if len(peers) == 1:
        if options.single_sample_advantage == "zero" or name == "pass_at_k":
            return 0.0
        return scale * r / (1 + epsilon if divides or name == "group_norm" else 1)
    mean = _mean(values)
    if name in ("mean_baseline", "dr_grpo"):
        return r - mean
    if name == "rloo":
        return r - _mean(others)
    if name == "gpg":
        return scale * (r - mean)
    if name == "group_norm":
        return (r - mean) / (_std(values, kind) + epsilon)
    if name == "maxrl":
        return (r - mean) / (mean + epsilon)
    if name == "opo":
        tokens = sum(length[p] for p in peers)
        if not tokens or min(values) == max(values):
            return 0.0
        return r - math.fsum(length[p] * reward[p] for p in peers) / tokens
    if name == "pass_at_k":
        best, second = sorted(values)[-1], sorted(values)[-2]
        if r != best or best == second:
            return 0.0
        divisor = _std(values, kind) + epsilon if options.grpo_std_normalization else 1.0
        return (best - second) / divisor
    assert name == "grpo"
    compared = others if options.use_leave_one_out_baseline else values
    difference = r - _mean(compared)
    if not divides:
        return difference
    sigma = _std(compared, kind)
    if options.grpo_std_scope == "batch":
        sigma = _std([reward[e] for e in everyone], kind)
    if options.use_leave_one_out_baseline and sigma == 0:
        return difference
    return difference / (sigma + epsilon)


def _gdpo(story: list[Sample], options: Options) -> list[list[float]]:
    keys = options.gdpo_reward_keys or tuple(sorted(story[0].parts))
    weights = options.gdpo_reward_weights or tuple(1.0 for _ in keys)
    summed: dict[int, float] = {}
    for key, weight in zip(keys, weights, strict=True):
        part = _group_level(
            "grpo", story, options, kl_coef=0.0, rewards={s.rollout: s.parts[key] for s in story}
        )
        for rollout, a in part.items():
            summed[rollout] = summed.get(rollout, 0.0) + weight * a
    if options.estimator_whitening and options.gdpo_whitening == "rollout":
        length: dict[int, int] = {}
        for s in story:
            length[s.rollout] = length.get(s.rollout, 0) + s.length
        ids = [r for r in sorted(summed) if length[r] or not options.exclude_masked_rollouts]
        white = dict(zip(ids, _whiten([summed[r] for r in ids]), strict=True))
        summed = {r: white.get(r, 0.0) for r in summed}
    out = [[summed[s.rollout] if t.mask else 0.0 for t in s.tokens] for s in story]
    if options.estimator_whitening and options.gdpo_whitening == "token":
        out = whiten_tokens(story, out)
    return out


def _token_level(name: str, sample: Sample, options: Options) -> list[float]:
    steps = [i for i, t in enumerate(sample.tokens) if t.mask or options.discount_masked_tokens]
    loss = [i for i, t in enumerate(sample.tokens) if t.mask]
    rewards = {i: -options.kl_coef * sample.tokens[i].kl if i in loss else 0.0 for i in steps}
    if loss:
        rewards[loss[-1]] += sample.reward
    out = [0.0] * len(sample.tokens)
    for place, i in enumerate(steps):
        if name == "ppo":
            # The definition: a sum over all later temporal differences.
            total = 0.0
            for later in range(place, len(steps)):
                value = sample.tokens[steps[later]].value
                after = 0.0
                if later + 1 < len(steps):
                    after = sample.tokens[steps[later + 1]].value
                delta = rewards[steps[later]] + options.gamma * after - value
                total += (options.gamma * options.lambd) ** (later - place) * delta
            out[i] = total
        else:
            gamma = 1.0 if name == "remax" else options.gamma
            total = sum(
                gamma ** (later - place) * rewards[steps[later]]
                for later in range(place, len(steps))
            )
            out[i] = total - (sample.greedy if name == "remax" else 0.0)
    return out


def as_settings(options: Options) -> dict[str, Any]:
    return dict(vars(options))
