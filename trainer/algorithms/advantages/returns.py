"""Estimators that give each token the reward that comes after it, and PPO's, which asks a critic.

`reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`, `ppo`.

Each sample is a sequence of its own. Its token rewards are r_t = −kl_coef · kl_t, and the reward of
its rollout on top at its last loss token; siblings are each given the rollout's reward at their own
end, and share one denominator in the loss. Time counts loss tokens: γ and λ do not decay over
observations, and a critic's value of an observation is not looked at (verl's GAE and NeMo-RL do the
same). With `discount_masked_tokens` every response token counts, as in slime. The two are equal for
`reinforce` and its kind where γ = 1. A sample without a loss token has neither reward nor return.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.algorithms.advantages.estimate import Estimate, Floats, missing, whitened
from trainer.algorithms.advantages.groups import group_centred
from trainer.algorithms.rewards import RewardBatch
from trainer.settings import AlgorithmSettings

__all__ = ["ppo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]


def reinforce(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """A_t = G_t = r_t + γ G_{t+1}. Williams 1992; OpenRLHF `reinforce`, without its whitening."""
    returns_N = _returns(batch, settings, settings.gamma)
    return _estimate(batch, returns_N, returns_N)


def reinforce_plus_plus(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """A_t = (G_t − mean) / sqrt(var + 1e-8) over the loss tokens of the step.

    G_t = r_t + γ G_{t+1}. Hu 2025, "REINFORCE++" (arXiv 2501.03262); verl, `core_algos.py`. slime
    leaves the whitening to `--normalize-advantages`: `--no-estimator-whitening`.
    """
    returns_N = _returns(batch, settings, settings.gamma)
    return _estimate(batch, _whitened(batch, settings, returns_N), returns_N)


def reinforce_plus_plus_baseline(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """A_t = r − μ_group − kl_coef · kl_t, then whitened over the loss tokens of the step.

    Hu 2025, "REINFORCE++", its baseline form; slime, `ppo_utils.py`; verl, which has no KL here.
    `reinforce_baseline` in OpenRLHF. The KL of a token lowers that token alone.
    """
    centred_N = batch.spread_exact(group_centred(batch, settings, batch.rollout_rewards()))
    if settings.kl_coef != 0:
        centred_N = centred_N - settings.kl_coef * batch.token_kl(settings.kl_coef)
    return _estimate(batch, _whitened(batch, settings, centred_N), None)


def remax(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """A_t = G_t − b, b the reward of the prompt's greedy rollout, G_t with γ = 1.

    Li et al. 2023, "ReMax" (arXiv 2310.10505); verl, `core_algos.py`. b is `baseline_rewards_B`,
    or, where that is None, the part `remax_baseline_key` of the reward. Raises InvalidArgument
    where there is neither.
    """
    baselines_B = batch.baseline_rewards_B
    if baselines_B is None:
        baselines_B = batch.part(settings.remax_baseline_key)
    returns_N = _returns(batch, settings, 1.0)
    return _estimate(batch, returns_N - baselines_B[batch.sample_N], returns_N)


def ppo(batch: RewardBatch, settings: AlgorithmSettings) -> Estimate:
    """A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t; returns A_t + V_t.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eq. 16; the value after the last token is 0. verl (there `gae`) whitens afterwards:
    `--normalize-advantages`. Raises InvalidArgument where the batch has no values.
    """
    if batch.values_N is None:
        raise missing(
            "ppo",
            "the value of each token, by a critic",
            "train with a critic, or take an estimator that needs none",
        )
    steps = _Steps.of(batch, settings)
    values_N = np.where(steps.counts_N, batch.values_N.astype(np.float64), 0.0)
    values_ST = steps.rows(values_N)
    after_ST = np.concatenate([values_ST[:, 1:], np.zeros((len(values_ST), 1))], axis=1)
    rewards_ST = steps.rows(_token_rewards(batch, settings))
    delta_ST = rewards_ST + settings.gamma * after_ST - values_ST
    advantages_N = steps.flat(_decayed(delta_ST, settings.gamma * settings.lambd))
    return _estimate(batch, advantages_N, advantages_N + values_N)


def _token_rewards(batch: RewardBatch, settings: AlgorithmSettings) -> Floats:
    """[N] −kl_coef · kl_t, and the rollout's reward on top at each sample's last loss token."""
    rewards_N = np.zeros(len(batch.loss_mask_N), np.float64)
    if settings.kl_coef != 0:
        rewards_N -= settings.kl_coef * batch.token_kl(settings.kl_coef)
    taken = np.flatnonzero(batch.taken_N)
    last_B = np.full(len(batch.rewards_B), -1, np.int64)
    last_B[batch.sample_N[taken]] = taken  # of several tokens of a sample, the last one stays
    has_B = last_B >= 0
    rewards_N[last_B[has_B]] += batch.rewards_B[has_B]
    return rewards_N


def _returns(batch: RewardBatch, settings: AlgorithmSettings, gamma: float) -> Floats:
    steps = _Steps.of(batch, settings)
    return steps.flat(_decayed(steps.rows(_token_rewards(batch, settings)), gamma))


def _decayed(values_ST: Floats, factor: float) -> Floats:
    """x_t = v_t + factor · x_{t+1} along the rows."""
    out_ST = values_ST.copy()
    for t in range(values_ST.shape[1] - 2, -1, -1):
        out_ST[:, t] += factor * out_ST[:, t + 1]
    return out_ST


def _whitened(batch: RewardBatch, settings: AlgorithmSettings, values_N: Floats) -> Floats:
    if not settings.estimator_whitening:
        return values_N
    out_N = np.zeros(len(values_N), np.float64)
    out_N[batch.taken_N] = whitened(values_N[batch.taken_N])
    return out_N


def _estimate(batch: RewardBatch, advantages_N: Floats, returns_N: Floats | None) -> Estimate:
    def to_float32(values_N: Floats) -> npt.NDArray[np.float32]:
        return np.where(batch.taken_N, values_N, 0.0).astype(np.float32)

    return Estimate(
        advantages_N=to_float32(advantages_N),
        returns_N=None if returns_N is None else to_float32(returns_N),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The tokens that count as steps of time, as rows: one a sample, zeros behind its last."""

    counts_N: npt.NDArray[np.bool_]
    sample_S: npt.NDArray[np.int64]
    """Row of each such token."""
    time_S: npt.NDArray[np.int64]
    """Its column: how many of its sample's stand before it."""
    n_samples: int

    @classmethod
    def of(cls, batch: RewardBatch, settings: AlgorithmSettings) -> _Steps:
        counts_N = batch.taken_N
        if settings.discount_masked_tokens:
            counts_N = np.ones_like(counts_N)
        sample_S = batch.sample_N[counts_N]
        n_samples = len(batch.rewards_B)
        lengths_B = np.bincount(sample_S, minlength=n_samples)
        first_B = np.cumsum(lengths_B) - lengths_B
        return cls(counts_N, sample_S, np.arange(len(sample_S)) - first_B[sample_S], n_samples)

    def rows(self, values_N: Floats) -> Floats:
        """[samples, longest] Samples are in order, so the tokens of each are contiguous."""
        width = int(self.time_S.max()) + 1 if len(self.time_S) else 1
        out_ST = np.zeros((self.n_samples, width), np.float64)
        out_ST[self.sample_S, self.time_S] = values_N[self.counts_N]
        return out_ST

    def flat(self, values_ST: Floats) -> Floats:
        """[N] The rows back in place; 0 where a token does not count."""
        out_N = np.zeros(len(self.counts_N), np.float64)
        out_N[self.counts_N] = values_ST[self.sample_S, self.time_S]
        return out_N
