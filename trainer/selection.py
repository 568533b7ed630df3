"""Which samples a rollout step trains on: a query over the ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from ledger.reader import Reader

__all__ = ["select_kept"]

# The last decision on a sample counts. What this branch, or what it forked from, has trained on
# already is left out, so that a sample is trained once.
_KEPT = """
select d.index
from (
    select index, group_index, arg_max(decision, seq) as decision
    from sample_decided
    where rollout_step = $rollout_step
    group by index, group_index
) as d
left join (
    select unnest(indices) as index, rollout_step from step_committed
) as c on c.index = d.index and c.rollout_step <> $rollout_step
where d.decision = 'kept' and c.index is null
order by d.group_index, d.index
"""


def select_kept(reader: Reader, rollout_step: int, *, n_samples: int) -> npt.NDArray[np.int64]:
    """[B] int64: the kept samples of a rollout step, by (group_index, index).

    `reader` is of the branch that is trained. Steps of this very rollout do not count as training
    before, so that a rollout which a kill cut is given again as it was. Raises InvalidArgument
    where they are not `n_samples`: the identity of the batch is broken.
    """
    table = reader.sql(_KEPT, {"rollout_step": rollout_step})
    indices: npt.NDArray[np.int64] = table["index"].to_numpy()
    if len(indices) != n_samples:
        raise InvalidArgument(
            explain(
                "choosing the samples of a rollout step",
                on=f"rollout step {rollout_step}",
                expected=f"{n_samples} kept samples: rollout_batch_size × n_samples_per_prompt",
                found=len(indices),
                do='ask why: ledger sql "select decision, reason, count(*) from decisions where '
                f'rollout_step = {rollout_step} group by all"',
            )
        )
    return indices
