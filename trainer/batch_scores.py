"""The reward of each sample: its last score."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.views import TableSource, register_views

__all__ = ["Scores", "read_scores"]

_SQL = """
SELECT position, count(*) AS scores, arg_max(reward, seq) AS reward,
       arg_max(raw_reward, seq) AS raw_reward, arg_max(rollout_id, seq) AS rollout_id
FROM wanted JOIN sample_scored USING (index)
GROUP BY position ORDER BY position
"""


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
    with duckdb.connect() as con:
        register_views(con, reader, only=("sample_scored",))
        wanted = {"index": indices_B, "position": np.arange(len(indices_B), dtype=np.int64)}
        con.register("wanted", pa.table(wanted))
        table = con.sql(_SQL).to_arrow_table()
    positions = table.column("position").to_numpy()
    if len(positions) < len(indices_B):
        missing = np.setdiff1d(np.arange(len(indices_B)), positions)
        raise NotFound(
            explain(
                "loading the batch of a step",
                on=f"samples {indices_B[missing].tolist()}",
                expected="a sample_scored event of each on this branch",
                found="none",
                do="score them before they are trained on",
            )
        )
    scored_rollout_B = table.column("rollout_id").to_numpy()
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
        rewards_B=np.asarray(table.column("reward").to_numpy(), np.float64),
        raw_rewards_B=np.asarray(table.column("raw_reward").to_numpy(), np.float64),
    )
