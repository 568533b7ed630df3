"""Takes chosen rows of a list column out of the files' own memory, without a copy in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["joined", "views_of"]


def views_of(column: pa.ChunkedArray, rows_P: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """The values of each of these rows, read-only, on the memory of the column."""
    chunks = column.chunks
    ends = np.cumsum([len(chunk) for chunk in chunks])
    number_P = np.searchsorted(ends, rows_P, side="right")
    views: list[npt.NDArray[Any]] = [np.empty(0, np.int32)] * len(rows_P)
    for number in np.unique(number_P).tolist():
        chunk = chunks[number]
        values = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        places = np.flatnonzero(number_P == number)
        rows = rows_P[places] - (ends[number] - len(chunk))
        for place, first, last in zip(
            places.tolist(), offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True
        ):
            views[place] = values[first:last]
    return views


def joined(views: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """One after the other, copied once; empty where there is none."""
    return np.concatenate(views, dtype=dtype) if views else np.empty(0, dtype)
