"""What an advantage estimator gets: the rewards of a step, by rollout and by group."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

__all__ = ["RewardBatch"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardBatch:
    """Rewards of the B samples of a step. E counts distinct rollouts, N response tokens.

    Raises InvalidArgument where it is made: lengths that disagree, a reward that is not finite, or
    siblings (samples of one rollout) with different rewards or groups.
    """

    rewards_B: npt.NDArray[np.float64]
    group_index_B: npt.NDArray[np.int64]
    rollout_id_B: npt.NDArray[np.int64]
    response_lengths_B: npt.NDArray[np.int64]
    loss_mask_N: npt.NDArray[np.uint8]
    """1 where the token enters the loss; the responses one after the other."""
    kl_N: npt.NDArray[np.float32] | None = None
    """KL to the reference of each token, where `kl_coef` needs it."""
    _first_E: npt.NDArray[np.int64] = field(init=False, repr=False)
    """First sample of each rollout; rollouts in order of their id."""
    _rollout_B: npt.NDArray[np.int64] = field(init=False, repr=False)
    """Row of each sample's rollout in the arrays [E]."""

    def __post_init__(self) -> None:
        n_samples = len(self.rewards_B)
        n_tokens = int(self.response_lengths_B.sum())
        for name, found, expected in (
            ("group_index_B", len(self.group_index_B), n_samples),
            ("rollout_id_B", len(self.rollout_id_B), n_samples),
            ("response_lengths_B", len(self.response_lengths_B), n_samples),
            ("loss_mask_N", len(self.loss_mask_N), n_tokens),
            ("kl_N", n_tokens if self.kl_N is None else len(self.kl_N), n_tokens),
        ):
            if found != expected:
                raise InvalidArgument(
                    explain("building a batch of rewards", on=name, expected=expected, found=found)
                )
        _, first_E, rollout_B = np.unique(self.rollout_id_B, return_index=True, return_inverse=True)
        object.__setattr__(self, "_first_E", first_E)
        object.__setattr__(self, "_rollout_B", rollout_B.reshape(-1))
        for name, values in (("reward", self.rewards_B), ("group_index", self.group_index_B)):
            for row in np.flatnonzero(values != values[self._first_E][self._rollout_B]):
                first = self._first_E[self._rollout_B[row]]
                if name == "reward" and not np.isfinite(values[[row, first]]).all():
                    continue
                raise InvalidArgument(
                    explain(
                        "building a batch of rewards",
                        on=f"rollout_id {self.rollout_id_B[row]}, samples {first} and {row}",
                        expected=f"one {name}: siblings of a rollout share it",
                        found=f"{values[first]} and {values[row]}",
                    )
                )
        for row in np.flatnonzero(~np.isfinite(self.rewards_B)):
            raise InvalidArgument(
                explain(
                    "building a batch of rewards",
                    on=f"sample {row} of the batch, rollout_id {self.rollout_id_B[row]}",
                    expected="a finite reward",
                    found=self.rewards_B[row],
                    do="score the sample again, or filter it out: it would spoil its whole group",
                )
            )

    @property
    def rollout_groups(self) -> npt.NDArray[np.int64]:
        """[E] The group of each rollout."""
        return self.group_index_B[self._first_E]

    def rollout_rewards(self, *, kl_coef: float = 0.0) -> npt.NDArray[np.float64]:
        """[E] The reward of each rollout, once; less kl_coef · Σ kl over its loss tokens.

        Raises InvalidArgument where `kl_coef` is not 0 and there is no `kl_N`.
        """
        rewards_E = self.rewards_B[self._first_E]
        if kl_coef == 0.0:
            return rewards_E
        if self.kl_N is None:
            raise InvalidArgument(
                explain(
                    "lowering rewards by their KL to the reference",
                    on=f"--kl-coef {kl_coef}",
                    expected="the KL of each token",
                    found="none: no reference model",
                    do="give a reference model, or set --kl-coef 0",
                )
            )
        # where, not a product: a masked token's KL may be NaN.
        kl_N = np.where(self.loss_mask_N > 0, self.kl_N.astype(np.float64), 0.0)
        kl_E = np.zeros(len(rewards_E), np.float64)
        np.add.at(kl_E, np.repeat(self._rollout_B, self.response_lengths_B), kl_N)
        return rewards_E - kl_coef * kl_E

    def spread(self, values_E: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """[N] Each rollout's value on every token of its samples whose mask is 1, else 0."""
        values_N = np.repeat(values_E[self._rollout_B], self.response_lengths_B)
        return np.where(self.loss_mask_N > 0, values_N, 0.0).astype(np.float32)
