"""Finds the events of given samples among all that a reader sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["positions_of", "select_rows"]


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
