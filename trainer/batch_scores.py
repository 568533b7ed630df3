"""The reward of each sample, and its parts: its last score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.views import TableSource
from trainer.batch_rows import positions_of, select_rows

__all__ = ["Scores", "read_scores"]

_COLUMNS = ("index", "seq", "rollout_id", "reward", "raw_reward", "part_names", "part_values")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """Rewards of B samples."""

    rewards_B: npt.NDArray[np.float64]
    raw_rewards_B: npt.NDArray[np.float64]
    part_names: tuple[str, ...]
    """Names of the P parts that any of the rewards has, sorted."""
    reward_parts_BP: npt.NDArray[np.float64]
    """NaN where the score of a sample lacks the part."""


def read_scores(
    reader: TableSource,
    indices_B: npt.NDArray[np.int64],
    rollout_id_B: npt.NDArray[np.int64],
) -> Scores:
    """Join the last score of each sample by its index.

    Raises NotFound, naming the samples without a score; InvalidEvent where a score names another
    rollout than the sample's prompt, or has not a value for each named part.
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
    part_names, reward_parts_BP = _parts(few.take(pa.array(last_B)), indices_B)
    return Scores(
        rewards_B=np.asarray(few.column("reward").to_numpy()[last_B], np.float64),
        raw_rewards_B=np.asarray(few.column("raw_reward").to_numpy()[last_B], np.float64),
        part_names=part_names,
        reward_parts_BP=reward_parts_BP,
    )


def _parts(
    last: pa.Table, indices_B: npt.NDArray[np.int64]
) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """The parts of the last scores, as columns."""
    names_B = last.column("part_names").combine_chunks()
    values_B = last.column("part_values").combine_chunks()
    counts_B = pc.list_value_length(names_B).to_numpy(zero_copy_only=False)
    for position in np.flatnonzero(
        counts_B != pc.list_value_length(values_B).to_numpy(zero_copy_only=False)
    ):
        raise InvalidEvent(
            explain(
                "reading the parts of a reward",
                on=f"sample {indices_B[position]}",
                expected=f"a value for each of {counts_B[position]} parts",
                found=f"{len(values_B[int(position)])} values",
            )
        )
    flat = names_B.flatten()
    names = tuple(sorted(flat.unique().to_pylist()))
    parts_BP = np.full((len(indices_B), len(names)), np.nan)
    column_S = pc.index_in(flat, value_set=pa.array(names, pa.string())).to_numpy()
    row_S = np.repeat(np.arange(len(indices_B)), counts_B)
    parts_BP[row_S, column_S] = values_B.flatten().to_numpy()
    return names, parts_BP
