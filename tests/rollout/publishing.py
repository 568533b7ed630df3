"""Weight versions of a model with one number, for tests of what stands around a trainer."""

from __future__ import annotations

import numpy as np

from ledger.events import WeightsPublished
from ledger.weights import tensor_record, weights_root

__all__ = ["published"]


def published(version: int) -> WeightsPublished:
    record = tensor_record("w", "float32", (1,), np.array([version], np.float32))
    return WeightsPublished(
        weight_version=version,
        parent_version=None if version == 0 else version - 1,
        step=None if version == 0 else version - 1,
        tensor_names=["w"],
        tensor_dtypes=["float32"],
        tensor_shapes=[np.array([1], np.int64)],
        tensor_checksums=[record.checksum],
        root=weights_root([record]),
        size_bytes=4,
        transport="none",
        acknowledged_by=[],
    )
