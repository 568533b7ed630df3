"""Estimators that compare the rollouts of one prompt: one advantage a rollout, on all its tokens.

`grpo`, `dr_grpo`, `mean_baseline`, `rloo`, `group_norm`, `maxrl`, `opo`, `gpg`, `pass_at_k`.

r is a rollout's reward (less kl_coef · Σ kl over its loss tokens), μ and σ mean and deviation in
its group. A group of one has nothing to compare with: it gives 0, or with `single_sample_advantage`
"reward" what verl gives, μ = 0 and σ = 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.advantages.estimate import Floats, centre, deviation
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = [
    "dr_grpo",
    "gpg",
    "group_centred",
    "group_norm",
    "group_relative",
    "grpo",
    "maxrl",
    "mean_baseline",
    "opo",
    "pass_at_k",
    "rloo",
]

GRPO_EPSILON = 1e-6
GROUP_NORM_EPSILON = 1e-9
MAXRL_EPSILON = 1e-6

Transform = Callable[[Floats], Floats]
"""Rewards [G] of a group of two rollouts or more → advantages [G]."""


def grpo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = (r − μ) / (σ + ε), ε = 1e-6 if `advantage_epsilon` is None.

    Shao et al. 2024, "DeepSeekMath", §4.1.2 (outcome supervision). σ has n − 1, or n with
    `advantage_deviation` "biased"; `grpo_std_scope` "batch" takes the deviation of all rollouts of
    the step. Without `grpo_std_normalization` A = r − μ. With `use_leave_one_out_baseline` μ and σ
    are those of the other rollouts of the group, and nothing is divided where the others are all
    alike (NeMo-RL, `advantage_estimator.py`).
    """
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    return batch.spread(group_relative(batch, settings, rewards_E))


def dr_grpo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = r − μ. Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO), §3.2.

    The paper's other half, a constant length in the loss, is an aggregation.
    """
    return _by_group(batch, settings, centre)


def mean_baseline(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = r − μ, whatever `grpo_std_normalization` says: another name of `dr_grpo`."""
    return _by_group(batch, settings, centre)


def rloo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A_i = r_i − mean of r_j, j ≠ i, = n/(n − 1) · (r − μ).

    Ahmadian et al. 2024, "Back to Basics", eq. 8.
    """
    return _by_group(batch, settings, _leave_one_out)


def group_norm(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = (r − μ) / (σ + ε), ε = 1e-9 if `advantage_epsilon` is None.

    GRPO under the name and with the ε of OpenRLHF (`experience_maker.py`).
    """
    epsilon = _epsilon(settings, GROUP_NORM_EPSILON)

    def normalise(rewards_G: Floats) -> Floats:
        centred_G = centre(rewards_G)
        return centred_G / (deviation(centred_G, settings.advantage_deviation) + epsilon)

    return _by_group(batch, settings, normalise, single_divisor=1.0 + epsilon)


def maxrl(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = (r − μ) / (μ + ε), ε = 1e-6 if `advantage_epsilon` is None; rewards are at least 0.

    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", eq. 10; SkyRL, `ppo_utils.py`.
    Where no rollout of a group has a reward, it gives 0. Raises InvalidArgument for a negative
    reward: μ + ε could then be 0.
    """
    epsilon = _epsilon(settings, MAXRL_EPSILON)
    if batch.rewards_B.size and batch.rewards_B.min() < 0:
        raise InvalidArgument(
            explain(
                "estimating advantages",
                on="--advantage-estimator maxrl",
                expected="rewards that are not negative: they stand for probabilities of success",
                found=float(batch.rewards_B.min()),
                do="shift the rewards, or take another estimator",
            )
        )

    def by_mean(rewards_G: Floats) -> Floats:
        return centre(rewards_G) / (float(rewards_G.mean()) + epsilon)

    return _by_group(batch, settings, by_mean)


def opo(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = r − Σ len·r / Σ len over the group, len the loss tokens of a rollout.

    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585); verl,
    `core_algos.py`. The baseline of least variance where the squared norm of a rollout's gradient
    grows with its length.
    """
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    lengths_E = batch.rollout_tokens.astype(np.float64)
    out_E = np.zeros(len(rewards_E), np.float64)
    for members in _groups(batch, settings):
        rewards_G, lengths_G = rewards_E[members], lengths_E[members]
        if len(rewards_G) == 1:
            out_E[members] = _single(rewards_G, settings)
        elif lengths_G.sum() > 0 and rewards_G.min() != rewards_G.max():
            out_E[members] = rewards_G - float(np.dot(lengths_G, rewards_G)) / lengths_G.sum()
    return batch.spread(out_E)


def gpg(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """A = α (r − μ), α = rollouts of the step / those of them whose reward is not 0.

    Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    with α and F_norm = 1 as verl has them (`core_algos.py`). The paper's loss is the plain policy
    gradient, without ratio or clip.
    """
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    counted_E = _counted(batch, settings)
    nonzero = max(int(np.count_nonzero(rewards_E[counted_E])), 1)
    alpha = int(counted_E.sum()) / nonzero
    return _by_group(batch, settings, lambda rewards_G: alpha * centre(rewards_G), single=alpha)


def pass_at_k(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.float32]:
    """The best rollout of a group gets r_max − r_second, divided as in `grpo`; the others get 0.

    verl `grpo_passk`, after arXiv 2503.19595. Where two rollouts share the best reward, nobody gets
    anything. A group of one always gives 0: there is no second.
    """
    epsilon = _epsilon(settings, GRPO_EPSILON)
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    out_E = np.zeros(len(rewards_E), np.float64)
    for members in _groups(batch, settings):
        rewards_G = rewards_E[members]
        if len(rewards_G) < 2:
            continue
        order = np.argsort(rewards_G, kind="stable")
        gain = rewards_G[order[-1]] - rewards_G[order[-2]]
        if settings.grpo_std_normalization:
            gain /= deviation(centre(rewards_G), settings.advantage_deviation) + epsilon
        out_E[np.flatnonzero(members)[order[-1]]] = gain
    return batch.spread(out_E)


def group_relative(batch: RewardBatch, settings: AlgorithmSettings, rewards_E: Floats) -> Floats:
    """[E] The advantage of `grpo` for rewards [E] of one kind, in float64."""
    epsilon = _epsilon(settings, GRPO_EPSILON)
    kind = settings.advantage_deviation
    divide = settings.grpo_std_normalization
    counted_E = _counted(batch, settings)
    shared = deviation(centre(rewards_E[counted_E]), kind)

    def normalise(rewards_G: Floats) -> Floats:
        if settings.use_leave_one_out_baseline:
            out_G = _leave_one_out(rewards_G)
            if not divide:
                return out_G
            sigma_G = _others_deviation(rewards_G, kind)
            if settings.grpo_std_scope == "batch":
                sigma_G[:] = shared
            return np.where(sigma_G > 0, out_G / (sigma_G + epsilon), out_G)
        centred_G = centre(rewards_G)
        if not divide:
            return centred_G
        sigma = shared if settings.grpo_std_scope == "batch" else deviation(centred_G, kind)
        return centred_G / (sigma + epsilon)

    out_E = np.zeros(len(rewards_E), np.float64)
    for members in _groups(batch, settings):
        rewards_G = rewards_E[members]
        if len(rewards_G) == 1:
            out_E[members] = _single(rewards_G, settings) / (1.0 + epsilon if divide else 1.0)
        else:
            out_E[members] = normalise(rewards_G)
    return out_E


def group_centred(batch: RewardBatch, settings: AlgorithmSettings, rewards_E: Floats) -> Floats:
    """[E] r − μ for rewards [E] of one kind, in float64."""
    out_E = np.zeros(len(rewards_E), np.float64)
    for members in _groups(batch, settings):
        rewards_G = rewards_E[members]
        single = len(rewards_G) == 1
        out_E[members] = _single(rewards_G, settings) if single else centre(rewards_G)
    return out_E


def _by_group(
    batch: RewardBatch,
    settings: AlgorithmSettings,
    transform: Transform,
    *,
    single: float = 1.0,
    single_divisor: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Apply `transform` to the rewards [G] of each group, one entry a rollout; spread to tokens.

    A rollout that is alone gets r · single / single_divisor where the settings ask for its reward.
    """
    rewards_E = batch.rollout_rewards(kl_coef=settings.kl_coef)
    advantages_E = np.zeros(len(rewards_E), np.float64)
    for members in _groups(batch, settings):
        rewards_G = rewards_E[members]
        if len(rewards_G) == 1:
            advantages_E[members] = _single(rewards_G, settings) * single / single_divisor
        else:
            advantages_E[members] = transform(rewards_G)
    return batch.spread(advantages_E)


def _groups(batch: RewardBatch, settings: AlgorithmSettings) -> list[npt.NDArray[np.bool_]]:
    """For each group which rollouts [E] are its members, in order of the group's key."""
    groups_E, counted_E = batch.rollout_groups, _counted(batch, settings)
    return [(groups_E == group) & counted_E for group in np.unique(groups_E[counted_E])]


def _counted(batch: RewardBatch, settings: AlgorithmSettings) -> npt.NDArray[np.bool_]:
    """[E] Whether the rollout's reward counts in what it is compared with."""
    if settings.exclude_masked_rollouts:
        return np.asarray(batch.rollout_tokens > 0)
    return np.ones(len(batch.rollout_groups), np.bool_)


def _single(rewards_G: Floats, settings: AlgorithmSettings) -> Floats:
    return rewards_G if settings.single_sample_advantage == "reward" else np.zeros(1)


def _epsilon(settings: AlgorithmSettings, default: float) -> float:
    return default if settings.advantage_epsilon is None else settings.advantage_epsilon


def _leave_one_out(rewards_G: Floats) -> Floats:
    n = len(rewards_G)
    return centre(rewards_G) * (n / (n - 1))


def _others_deviation(rewards_G: Floats, kind: str) -> Floats:
    """[G] For each rollout the deviation of the others; exactly 0 where those are all alike."""
    return np.array(
        [deviation(centre(np.delete(rewards_G, i)), kind) for i in range(len(rewards_G))]
    )
