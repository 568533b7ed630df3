"""What an advantage estimator gets: the rewards of a step, by rollout, by group and by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

__all__ = ["RewardBatch"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardBatch:
    """Rewards of the B samples of a step. E counts distinct rollouts, N response tokens.

    What stands beside the rewards is there where the estimator needs it, and None elsewhere; what
    an array [N] holds where the loss mask is 0 means nothing, NaN included.

    Raises InvalidArgument where it is made: lengths that disagree, a reward that is not finite, or
    siblings (samples of one rollout) with different rewards or groups.
    """

    rewards_B: Floats
    group_index_B: npt.NDArray[np.int64]
    rollout_id_B: npt.NDArray[np.int64]
    response_lengths_B: npt.NDArray[np.int64]
    loss_mask_N: npt.NDArray[np.uint8]
    """1 where the token enters the loss; the responses one after the other."""
    kl_N: npt.NDArray[np.float32] | None = None
    """KL to the reference of each token, where `kl_coef` needs it."""
    log_probs_N: npt.NDArray[np.float32] | None = None
    """By the policy that the ratio is taken against, where distillation needs it."""
    teacher_log_probs_N: npt.NDArray[np.float32] | None = None
    """By the teacher, of the same tokens."""
    values_N: npt.NDArray[np.float32] | None = None
    """The critic's value of the state in which each token was chosen, before it; for `ppo`."""
    baseline_rewards_B: Floats | None = None
    """Reward of the greedy rollout of each sample's prompt; for `remax`."""
    part_names: tuple[str, ...] = ()
    """Names of the P parts of a reward; for `gdpo`."""
    reward_parts_BP: Floats | None = None
    """Their values; NaN where a sample's score lacks the part."""
    _first_E: npt.NDArray[np.int64] = field(init=False, repr=False)
    """First sample of each rollout; rollouts in order of their id."""
    _rollout_B: npt.NDArray[np.int64] = field(init=False, repr=False)
    """Row of each sample's rollout in the arrays [E]."""

    def __post_init__(self) -> None:
        self._check_lengths()
        _, first_E, rollout_B = np.unique(self.rollout_id_B, return_index=True, return_inverse=True)
        object.__setattr__(self, "_first_E", first_E)
        object.__setattr__(self, "_rollout_B", rollout_B.reshape(-1))
        self._check_siblings("reward", self.rewards_B)
        self._check_siblings("group_index", self.group_index_B)
        if self.baseline_rewards_B is not None:
            self._check_siblings("baseline reward", self.baseline_rewards_B)
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

    def _check_lengths(self) -> None:
        n_samples = len(self.rewards_B)
        n_tokens = int(self.response_lengths_B.sum())
        for name, array, expected in (
            ("group_index_B", self.group_index_B, (n_samples,)),
            ("rollout_id_B", self.rollout_id_B, (n_samples,)),
            ("response_lengths_B", self.response_lengths_B, (n_samples,)),
            ("loss_mask_N", self.loss_mask_N, (n_tokens,)),
            ("kl_N", self.kl_N, (n_tokens,)),
            ("log_probs_N", self.log_probs_N, (n_tokens,)),
            ("teacher_log_probs_N", self.teacher_log_probs_N, (n_tokens,)),
            ("values_N", self.values_N, (n_tokens,)),
            ("baseline_rewards_B", self.baseline_rewards_B, (n_samples,)),
            ("reward_parts_BP", self.reward_parts_BP, (n_samples, len(self.part_names))),
        ):
            if array is not None and array.shape != expected:
                raise InvalidArgument(
                    explain(
                        "building a batch of rewards",
                        on=name,
                        expected=f"shape {expected}",
                        found=f"shape {array.shape}",
                    )
                )

    def part(self, name: str) -> Floats:
        """[B] One part of the rewards.

        Raises InvalidArgument where it is unknown, not finite, or not the same for siblings.
        """
        if self.reward_parts_BP is None or name not in self.part_names:
            found = ", ".join(self.part_names) or "no parts"
            raise _wrong_part(name, "a part of the rewards", found)
        values_B = self.reward_parts_BP[:, self.part_names.index(name)]
        for row in np.flatnonzero(~np.isfinite(values_B)):
            raise _wrong_part(
                name,
                "a finite value for every sample",
                f"{values_B[row]} for sample {row} of the batch, rollout_id "
                f"{self.rollout_id_B[row]}",
            )
        self._check_siblings(f"reward part {name!r}", values_B)
        return values_B

    def _check_siblings(self, name: str, values_B: npt.NDArray[np.generic]) -> None:
        first_B = values_B[self._first_E][self._rollout_B]
        differ_B = values_B != first_B
        if np.issubdtype(values_B.dtype, np.floating):
            # Two that are both not finite are told by the check of the rewards themselves.
            differ_B &= np.isfinite(values_B) | np.isfinite(first_B)
        for row in np.flatnonzero(differ_B):
            raise InvalidArgument(
                explain(
                    "building a batch of rewards",
                    on=f"rollout_id {self.rollout_id_B[row]}, samples "
                    f"{self._first_E[self._rollout_B[row]]} and {row}",
                    expected=f"one {name}: siblings of a rollout share it",
                    found=f"{first_B[row]} and {values_B[row]}",
                )
            )

    @property
    def taken_N(self) -> npt.NDArray[np.bool_]:  # noqa: N802
        """[N] True where the token enters the loss."""
        return np.asarray(self.loss_mask_N > 0)

    @property
    def sample_N(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """[N] The sample of each token, 0..B-1."""
        return np.repeat(np.arange(len(self.rewards_B)), self.response_lengths_B)

    @property
    def rollout_groups(self) -> npt.NDArray[np.int64]:
        """[E] The group of each rollout."""
        return self.group_index_B[self._first_E]

    @property
    def rollout_tokens(self) -> npt.NDArray[np.int64]:
        """[E] Tokens of each rollout that enter the loss, over all its samples."""
        rollout_N = self._rollout_B[self.sample_N]
        return np.bincount(rollout_N[self.taken_N], minlength=len(self._first_E))

    def by_rollout(self, values_B: Floats) -> Floats:
        """[E, ...] Of values that siblings share, each rollout's once."""
        return values_B[self._first_E]

    def rollout_rewards(self, *, kl_coef: float = 0.0) -> Floats:
        """[E] The reward of each rollout, once; less kl_coef · Σ kl over its loss tokens.

        Raises InvalidArgument where `kl_coef` is not 0 and there is no `kl_N`.
        """
        rewards_E = self.rewards_B[self._first_E]
        if kl_coef == 0.0:
            return rewards_E
        kl_E = np.zeros(len(rewards_E), np.float64)
        np.add.at(kl_E, self._rollout_B[self.sample_N], self.token_kl(kl_coef))
        return rewards_E - kl_coef * kl_E

    def token_kl(self, kl_coef: float) -> Floats:
        """[N] KL of each loss token, else 0. Raises InvalidArgument where there is no `kl_N`."""
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
        return np.where(self.taken_N, self.kl_N.astype(np.float64), 0.0)

    def spread(self, values_E: Floats) -> npt.NDArray[np.float32]:
        """[N] Each rollout's value on every token of its samples whose mask is 1, else 0."""
        return self.spread_exact(values_E).astype(np.float32)

    def spread_exact(self, values_E: Floats) -> Floats:
        """[N] As `spread`, in float64."""
        values_N = np.repeat(values_E[self._rollout_B], self.response_lengths_B)
        return np.where(self.taken_N, values_N, 0.0)


def _wrong_part(name: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "reading a part of the rewards",
            on=repr(name),
            expected=expected,
            found=found,
            do="name parts that the reward function returns for every sample",
        )
    )
