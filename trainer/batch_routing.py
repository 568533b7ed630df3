"""Recorded expert choices of samples, put together and checked for holes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.reader import Reader
from ledger.views import TableSource
from trainer.batch_rows import select_rows

__all__ = ["read_routing"]

_COLUMNS = ("index", "start", "rows", "layers", "topk", "num_experts", "dtype", "expert_ids")
_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


def read_routing(
    reader: TableSource, indices_B: npt.NDArray[np.int64], lengths_B: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.integer], ...] | None:
    """Of each sample [tokens − 1, MoE layers, K], order of the top-k kept; None if none has any.

    `lengths_B` are tokens of prompt and response. A sample with one segment is a view of the stored
    bytes, not a copy.

    Raises NoLongerKept where routing of these samples was recorded and a rule of retention has
    retired it since; NotFound where some samples have routing and others, named, have none;
    InvalidEvent for a hole, an overlap, bytes that do not fit their shape, an id that is no expert,
    or segments of different shape.
    """
    table = reader.table("routing_recorded", _COLUMNS)
    table = table.filter(pa.array(select_rows(table.column("index"), indices_B))).sort_by(
        [("index", "ascending"), ("start", "ascending")]
    )
    row_index = table.column("index").to_numpy()
    missing = np.setdiff1d(indices_B, row_index)
    if isinstance(reader, Reader):
        # Without this, a step whose routing is retired would be run again as one that had none.
        reader.require_kept("routing_recorded", "index", missing.tolist())
    if table.num_rows == 0:
        return None
    if len(missing):
        raise NotFound(
            explain(
                "loading the routing of a step",
                on=f"samples {missing.tolist()}",
                expected=f"routing_recorded events, as the other {len(indices_B) - len(missing)} "
                "samples have",
                found="none",
                do="an MoE step needs the routing of every sample: record it while sampling, and "
                "keep it as long as the samples are trained on",
            )
        )
    blobs = table.column("expert_ids")
    meta = table.drop_columns(["expert_ids"]).to_pylist()  # one row a segment, not a token
    shape = (meta[0]["layers"], meta[0]["topk"], meta[0]["num_experts"], meta[0]["dtype"])
    out: list[npt.NDArray[np.integer]] = []
    for index, length in zip(indices_B.tolist(), lengths_B.tolist(), strict=True):
        first, last = np.searchsorted(row_index, [index, index + 1])
        parts: list[npt.NDArray[np.integer]] = []
        reached = 0
        for row in range(int(first), int(last)):
            said = meta[row]
            if (said["layers"], said["topk"], said["num_experts"], said["dtype"]) != shape:
                raise _invalid(index, f"layers, K, experts and dtype {shape}", said)
            if said["start"] != reached and isinstance(reader, Reader):
                reader.require_kept("routing_recorded", "index", [index])
            if said["start"] != reached:
                what = "a hole" if said["start"] > reached else "an overlap"
                raise _invalid(
                    index,
                    f"the next rows at position {reached} of {length - 1}",
                    f"{what}: they start at {said['start']}",
                )
            parts.append(_decode(index, said, blobs[row].as_buffer()))
            reached += said["rows"]
        if reached != length - 1 and isinstance(reader, Reader):
            reader.require_kept("routing_recorded", "index", [index])
        if reached != length - 1:
            raise _invalid(
                index,
                f"{length - 1} rows: one for each of its {length} tokens but the last",
                f"{reached}: what follows position {reached} is missing"
                if reached < length
                else reached,
            )
        out.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return tuple(out)


def _decode(index: int, said: dict[str, Any], buffer: pa.Buffer) -> npt.NDArray[np.integer]:
    dtype = _DTYPES.get(said["dtype"])
    shape = (said["rows"], said["layers"], said["topk"])
    if dtype is None:
        raise _invalid(index, f"a dtype of {sorted(_DTYPES)}", said["dtype"])
    if buffer.size != int(np.prod(shape)) * dtype.itemsize:
        raise _invalid(index, f"{shape} ids of {dtype.itemsize} bytes", f"{buffer.size} bytes")
    ids: npt.NDArray[np.integer] = np.frombuffer(buffer, dtype).reshape(shape)
    if ids.size and int(ids.max()) >= said["num_experts"]:
        raise _invalid(index, f"ids below {said['num_experts']}", int(ids.max()))
    return ids


def _invalid(index: int, expected: object, found: object) -> InvalidEvent:
    return InvalidEvent(
        explain(
            "putting the routing of a sample together",
            on=f"sample {index}",
            expected=expected,
            found=found,
            do="a missing turn or an aborted call leaves such a hole; this sample cannot be "
            "trained with routing replay",
        )
    )
