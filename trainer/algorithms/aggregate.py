"""How the losses of tokens become the loss of a step: a weighted sum, its weights known before.

Loss = Σ_t w_t · x_t over all tokens of the step. Because w depends on the masks alone,
micro-batches add up without knowing of each other, whatever the partition and the ranks.

With m the loss mask, B samples, R rollouts, all of the whole step, and H = `loss_scale_factor`:

| `--loss-aggregation` | weight of a token | also |
|---|---|---|
| `rollout` | m / Σ m of its rollout / R | slime, Miles |
| `token` | m / Σ m | slime `--calculate-per-token-loss`; verl `token-mean`; TRL `dapo`, `bnpo` |
| `token-sum` | m | verl |
| `seq-mean-token-mean` | m / Σ m of its sample / B | verl; TRL `grpo` |
| `seq-mean-token-sum` | m / B | verl; TRL `luspo` |
| `seq-mean-token-sum-norm` | m / (B · H) | verl; TRL `dr_grpo` |

Each name of a framework is accepted as well, and stands for the same thing. Siblings (samples of
one rollout) share one denominator by `rollout` only; elsewhere each is a sequence of its own, as in
verl and TRL. A sample without a loss token counts in B, and a rollout without one in R. TRL takes
`bnpo`, and verl without its global sizes every mode, over one micro-batch; here it is always the
whole step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

__all__ = ["token_weights"]

_SAME = {
    "token-mean": "token",
    "dapo": "token",
    "bnpo": "token",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""Names that stand for another."""


def token_weights(
    loss_mask_N: npt.NDArray[np.uint8],
    response_lengths_B: npt.NDArray[np.int64],
    rollout_id_B: npt.NDArray[np.int64],
    *,
    aggregation: str,
    global_batch_size: int,
    loss_scale_factor: float | None = None,
) -> npt.NDArray[np.float32]:
    """The weight [N] of each response token in the loss of the step; 0 where the mask is 0.

    `aggregation` is a name of the table above, `global_batch_size` the rollouts of the step. By
    `rollout` each rollout weighs 1/global_batch_size, shared evenly by the loss tokens of all its
    samples (slime, `cp_utils.py`: `rollout_mask_sums`).

    A rollout without a loss token contributes nothing; a step without one has weights 0 throughout.

    Raises InvalidArgument: an unknown aggregation, or a missing `loss_scale_factor`.
    """
    mask_N = (loss_mask_N > 0).astype(np.float64)
    kind = _SAME.get(aggregation, aggregation)
    if kind == "rollout":
        _, unit_B = np.unique(rollout_id_B, return_inverse=True)
        scale_N = _tokens_of_unit(mask_N, response_lengths_B, unit_B) * global_batch_size
    elif kind == "token":
        scale_N = np.full(len(mask_N), max(mask_N.sum(), 1.0))
    elif kind == "token-sum":
        scale_N = np.ones(len(mask_N))
    elif kind == "seq-mean-token-mean":
        samples = len(response_lengths_B)
        scale_N = _tokens_of_unit(mask_N, response_lengths_B, np.arange(samples)) * samples
    elif kind == "seq-mean-token-sum":
        scale_N = np.full(len(mask_N), float(len(response_lengths_B)))
    elif kind == "seq-mean-token-sum-norm" and loss_scale_factor is not None:
        scale_N = np.full(len(mask_N), len(response_lengths_B) * float(loss_scale_factor))
    else:
        raise InvalidArgument(
            explain(
                "weighing the tokens of a step",
                on=f"--loss-aggregation {aggregation}",
                expected="a known aggregation, with --loss-scale-factor where it needs one",
                found=f"--loss-scale-factor {loss_scale_factor}",
            )
        )
    return np.asarray(mask_N / scale_N, np.float32)


def _tokens_of_unit(
    mask_N: npt.NDArray[np.float64],
    response_lengths_B: npt.NDArray[np.int64],
    unit_B: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """[N] The loss tokens of all samples of the token's unit (a rollout, or a sample)."""
    unit_N = np.repeat(unit_B.reshape(-1), response_lengths_B)
    tokens_U = np.bincount(unit_N, weights=mask_N, minlength=len(response_lengths_B))
    # 1, not 0: such a unit has no token with mask 1, so its weights are 0 anyway.
    return np.asarray(np.maximum(tokens_U, 1.0)[unit_N], np.float64)
