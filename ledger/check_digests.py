"""The rules of `ledger check` that SQL cannot say: digests made again, and bytes looked into.

Each function gives the violations as (invariant, kind, branch, seq, index or None, what).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from blake3 import blake3

from ledger.routing import repeated_expert
from ledger.views import TableSource
from ledger.weights import TensorRecord, weights_root

__all__ = ["RECOMPUTED", "Violation", "wrong_experts", "wrong_prompts", "wrong_roots"]

Violation = tuple[str, str, str, int, int | None, str]


def wrong_prompts(reader: TableSource) -> list[Violation]:
    """Prompts whose `prompt_id` is not the digest of their token ids (I)."""
    kind = "prompt_issued"
    table = reader.table(kind, ["prompt_id", "tokens", "branch", "seq"])
    made: list[Violation] = []
    for batch in table.to_batches():
        ids, tokens, branches, seqs = (batch.column(i) for i in range(4))
        values = tokens.flatten().to_numpy(zero_copy_only=False).astype("<i4", copy=False)
        ends = np.cumsum(tokens.value_lengths().to_numpy(zero_copy_only=False))
        for row in range(batch.num_rows):
            start = int(ends[row - 1]) if row else 0
            wanted = blake3(values[start : int(ends[row])].tobytes()).digest()
            found = ids[row].as_py()
            if found != wanted:
                what = f"prompt_id {found.hex()}; the ids give {wanted.hex()}"
                made.append(("I", kind, branches[row].as_py(), seqs[row].as_py(), None, what))
    return made


def wrong_roots(reader: TableSource) -> list[Violation]:
    """Versions whose `root` is not that of their tensors (IV)."""
    kind = "weights_published"
    columns = ["tensor_names", "tensor_dtypes", "tensor_shapes", "tensor_checksums"]
    table = reader.table(kind, [*columns, "root", "weight_version", "branch", "seq"])
    made: list[Violation] = []
    for batch in table.to_batches():
        for row in batch.to_pylist():
            named = [row[name] for name in columns]
            if len({len(values) for values in named}) > 1:
                continue  # check_rules says so
            root = weights_root(
                TensorRecord(name, dtype, tuple(shape), checksum)
                for name, dtype, shape, checksum in zip(*named, strict=True)
            )
            if root != row["root"]:
                what = (
                    f"version {row['weight_version']}: root {row['root'].hex()}; "
                    f"its tensors give {root.hex()}"
                )
                made.append(("IV", kind, row["branch"], row["seq"], None, what))
    return made


def wrong_experts(reader: TableSource) -> list[Violation]:
    """Routing that names an expert which the layer does not have, or one twice for a token (I)."""
    kind = "routing_recorded"
    shape = ["rows", "layers", "topk", "segment", "start"]
    columns = ["dtype", "num_experts", "expert_ids", "index", "branch", "seq", *shape]
    table = reader.table(kind, columns)
    made: list[Violation] = []
    for batch in table.to_batches():
        dtypes, experts, ids, indices, branches, seqs = (batch.column(i) for i in range(6))
        for row in range(batch.num_rows):
            data, dtype = ids[row].as_buffer(), dtypes[row].as_py()
            if dtype not in ("uint8", "uint16"):
                what = f"dtype {dtype!r}: expected 'uint8' or 'uint16'"
            elif data.size % np.dtype(dtype).itemsize or not data.size:
                continue  # check_rules says so
            else:
                flat = np.frombuffer(data, dtype)
                largest = int(flat.max())
                if largest < experts[row].as_py():
                    what = _repeated(flat, *(batch.column(name)[row].as_py() for name in shape))
                else:
                    what = f"expert {largest} of {experts[row].as_py()}"
                if not what:
                    continue
            place = branches[row].as_py(), seqs[row].as_py(), indices[row].as_py()
            made.append(("I", kind, *place, what))
    return made


def _repeated(flat: np.ndarray, rows: int, layers: int, topk: int, segment: int, start: int) -> str:
    """What is wrong where an expert stands twice for one token and layer; else nothing."""
    if len(flat) != rows * layers * topk:
        return ""  # check_rules says so
    ids = flat.reshape(rows, layers, topk)
    found = repeated_expert(ids)
    if found is None:
        return ""
    token, layer = found
    zero = "" if ids[:, layer].any() else "; all of this layer is zero: nobody captured it"
    return (
        f"segment {segment}, layer {layer}, position {start + token}: one expert twice in "
        f"{ids[token, layer].tolist()}{zero}"
    )


RECOMPUTED: tuple[tuple[str, Callable[[TableSource], list[Violation]]], ...] = (
    ("I", wrong_prompts),
    ("I", wrong_experts),
    ("IV", wrong_roots),
)
"""Every rule with the invariant that it checks."""
