"""The reward of each sample: its last score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.views import TableSource
from trainer.batch_rows import positions_of, select_rows

__all__ = ["Scores", "read_scores"]

_COLUMNS = ("index", "seq", "rollout_id", "reward", "raw_reward")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """Rewards of B samples."""

    rewards_B: npt.NDArray[np.float64]
    raw_rewards_B: npt.NDArray[np.float64]


def read_scores(
    reader: TableSource,
    indices_B: npt.NDArray[np.int64],
    rollout_id_B: npt.NDArray[np.int64],
) -> Scores:
    """Join the last score of each sample by its index.

    Raises NotFound, naming the samples without a score; InvalidEvent where a score names another
    rollout than the sample's prompt.
    """
    table = reader.table("sample_scored", _COLUMNS)
    few = table.filter(pa.array(select_rows(table.column("index"), indices_B)))
    position_S = positions_of(few.column("index").to_numpy(), indices_B)
    last_B = np.full(len(indices_B), -1, np.int64)
    order = np.argsort(few.column("seq").to_numpy(), kind="stable")
    last_B[position_S[order]] = order  # of several scores of a sample, the last assignment stays
    if (last_B < 0).any():
        raise NotFound(
            explain(
                "loading the batch of a step",
                on=f"samples {indices_B[last_B < 0].tolist()}",
                expected="a sample_scored event of each on this branch",
                found="none",
                do="score them before they are trained on",
            )
        )
    scored_rollout_B = few.column("rollout_id").to_numpy()[last_B]
    for position in np.flatnonzero(scored_rollout_B != rollout_id_B):
        raise InvalidEvent(
            explain(
                "joining scores to samples",
                on=f"sample {indices_B[position]}",
                expected=f"rollout_id {rollout_id_B[position]}, as its prompt says",
                found=f"rollout_id {scored_rollout_B[position]} in its score",
            )
        )
    return Scores(
        rewards_B=np.asarray(few.column("reward").to_numpy()[last_B], np.float64),
        raw_rewards_B=np.asarray(few.column("raw_reward").to_numpy()[last_B], np.float64),
    )
