"""Which samples a rollout step trains on: a query over the ledger.

What is counted is rollouts (episodes), not samples: an episode may leave several samples (siblings:
sub-agents, a compacted context), whose reward counts once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from ledger.reader import Reader

__all__ = ["select_kept", "split_rollouts"]

# The last decision on a sample counts. What this branch, or what it forked from, has trained on
# already is left out, so that a sample is trained once.
_KEPT = """
select d.index, d.rollout_id
from (
    select index, group_index, rollout_id, arg_max(decision, seq) as decision
    from sample_decided
    where rollout_step = $rollout_step
    group by index, group_index, rollout_id
) as d
left join (
    select unnest(indices) as index, rollout_step from step_committed
) as c on c.index = d.index and c.rollout_step <> $rollout_step
where d.decision = 'kept' and c.index is null
order by d.group_index, d.rollout_id, d.index
"""


def select_kept(
    reader: Reader, rollout_step: int, *, n_rollouts: int, n_steps: int = 1
) -> list[npt.NDArray[np.int64]]:
    """The kept samples of a rollout step, of each of its `n_steps` optimizer steps.

    Arrays [B] int64 by (group_index, rollout_id, index), each of as many rollouts, none cut between
    two. `reader` is of the branch that is trained. Steps of this very rollout do not count as
    training before, so that a rollout which a kill cut is given again as it was. Raises
    InvalidArgument where the samples are not of `n_rollouts` rollouts, a multiple of `n_steps`: the
    identity of the batch is broken.
    """
    table = reader.sql(_KEPT, {"rollout_step": rollout_step})
    rollout_id_B = table["rollout_id"].to_numpy()
    rollouts = len(np.unique(rollout_id_B))
    if rollouts != n_rollouts:
        siblings = f", {len(rollout_id_B)} samples" if len(rollout_id_B) != rollouts else ""
        raise InvalidArgument(
            explain(
                "choosing the samples of a rollout step",
                on=f"rollout step {rollout_step}",
                expected=f"kept samples of {n_rollouts} rollouts: rollout_batch_size × "
                "n_samples_per_prompt",
                found=f"{rollouts} rollouts{siblings}",
                do='ask why: ledger sql "select decision, reason, count(*) from decisions where '
                f'rollout_step = {rollout_step} group by all"',
            )
        )
    return split_rollouts(table["index"].to_numpy(), rollout_id_B, n_steps)


def split_rollouts(
    indices_B: npt.NDArray[np.int64], rollout_id_B: npt.NDArray[np.int64], n_parts: int
) -> list[npt.NDArray[np.int64]]:
    """Cut samples, whose siblings follow each other, into parts of as many rollouts each.

    Raises InvalidArgument where the rollouts are no multiple of `n_parts`.
    """
    first_E = np.flatnonzero(np.diff(rollout_id_B, prepend=rollout_id_B[:1] - 1))
    if len(first_E) % n_parts:
        raise InvalidArgument(
            explain(
                "dividing a rollout step into optimizer steps",
                expected=f"a multiple of {n_parts} rollouts",
                found=len(first_E),
            )
        )
    size = len(first_E) // n_parts
    return np.split(indices_B, first_E[size::size][: n_parts - 1])
