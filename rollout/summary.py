"""What a rollout step that is decided holds, read from the ledger alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollout.worker import RolloutSummary

if TYPE_CHECKING:
    from ledger.reader import Reader

__all__ = ["read_summary"]


def read_summary(reader: Reader, rollout_step: int) -> RolloutSummary:
    """The samples that a rollout step decided: kept, dropped, or put back.

    Samples without a score have the raw reward NaN, and are in no mean; nor are greedy baselines.
    Siblings share the reward of their rollout, which is counted once.
    """
    decisions = _last(reader, rollout_step)
    order = np.lexsort((decisions["index"].to_numpy(), decisions["group_index"].to_numpy()))
    decisions = decisions.take(pa.array(order))
    indices = decisions["index"].to_numpy()
    said = decisions["decision"].to_pylist()
    rewards = _rewards(reader, indices)
    baseline = np.array([one == "baseline" for one in decisions["reason"].to_pylist()], bool)
    first = np.zeros(len(indices), bool)
    first[np.unique(decisions["rollout_id"].to_numpy(), return_index=True)[1]] = True
    counted = ~np.isnan(rewards) & ~baseline & first
    tokens, seconds = _generated(reader, indices)
    return RolloutSummary(
        rollout_step=rollout_step,
        kept_indices=indices[np.array([one == "kept" for one in said], bool)],
        indices=indices,
        raw_rewards=rewards,
        mean_reward=float(rewards[counted].mean()) if counted.any() else float("nan"),
        tokens=tokens,
        generation_time_s=seconds,
        counts=dict(sorted(Counter(said).items())),
    )


def _last(reader: Reader, rollout_step: int) -> pa.Table:
    """The last decision of the step on each sample."""
    columns = ["index", "group_index", "rollout_id", "rollout_step", "decision", "reason"]
    table = reader.table(
        "sample_decided", columns, where={"rollout_step": (rollout_step, rollout_step)}
    )
    table = table.filter(pc.equal(table["rollout_step"], rollout_step))
    _, back = np.unique(table["index"].to_numpy()[::-1], return_index=True)
    return table.take(pa.array(table.num_rows - 1 - back))


def _of(reader: Reader, kind: str, columns: list[str], indices: npt.NDArray[np.int64]) -> Any:
    if not len(indices):
        return reader.table(kind, columns).slice(0, 0)
    table = reader.table(kind, columns, where={"index": (int(indices.min()), int(indices.max()))})
    return table.filter(pc.is_in(table["index"], pa.array(indices)))


def _rewards(reader: Reader, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    table = _of(reader, "sample_scored", ["index", "raw_reward"], indices)
    found = dict(zip(table["index"].to_pylist(), table["raw_reward"].to_pylist(), strict=True))
    return np.array([found.get(index, np.nan) for index in indices.tolist()], np.float64)


def _generated(reader: Reader, indices: npt.NDArray[np.int64]) -> tuple[int, float]:
    """Response tokens of the samples, and the seconds of their engine calls together."""
    segments = _of(reader, "segment_generated", ["index", "tokens", "generation_time_s"], indices)
    seen = _of(reader, "observation_appended", ["index", "tokens"], indices)
    tokens = sum(
        pc.sum(pc.list_value_length(one["tokens"])).as_py() or 0 for one in (segments, seen)
    )
    return int(tokens), float(pc.sum(segments["generation_time_s"]).as_py() or 0.0)
