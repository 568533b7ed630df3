"""Finds the events of given samples among all that a reader sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidArgument, explain

__all__ = ["distinct_samples", "positions_of", "select_rows"]


def distinct_samples(indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`indices` as int64 [B]. Raises InvalidArgument: no sample, or one twice."""
    indices_B = np.asarray(indices, dtype=np.int64)
    distinct, counts = np.unique(indices_B, return_counts=True)
    if len(indices_B) == 0 or counts.max() > 1:
        raise InvalidArgument(
            explain(
                "loading the batch of a step",
                expected="one sample or more, each once",
                found=f"samples twice or more: {distinct[counts > 1].tolist()}"
                if len(indices_B)
                else "none",
            )
        )
    return indices_B


def select_rows(index: pa.ChunkedArray, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each row whether its sample is one of `indices_B`."""
    chosen: npt.NDArray[np.bool_] = pc.is_in(index, value_set=pa.array(indices_B)).to_numpy()
    return chosen


def positions_of(
    index: npt.NDArray[np.int64], indices_B: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The place of each sample in `indices_B`, whose values differ; every sample is one of them."""
    order = np.argsort(indices_B)
    return order[np.searchsorted(indices_B, index, sorter=order)]
