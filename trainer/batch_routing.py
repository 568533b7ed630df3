"""Recorded expert choices of samples, put together and checked for holes.

L MoE layers, K experts a token; a sample of T tokens has T − 1 rows, because the last token is
never fed to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.reader import Reader
from ledger.routing import repeated_expert
from ledger.views import TableSource
from trainer.batch_rows import select_rows

__all__ = ["BY_ENGINE", "Routing", "RoutingSource", "read_routing"]

_META = (
    *("index", "segment", "start", "rows", "layers", "topk", "num_experts", "dtype"),
    "policy_version",
)
_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSource:
    """Whose choices of experts a step replays."""

    policy_version: int | None = None
    """The old policy's, in its forward before the rollout's first step; None: the engine's."""
    branch: str | None = None
    """Where that was recorded; None: on any branch that the reader sees."""
    weights: bool = False
    """The recorded gate weights too."""


BY_ENGINE = RoutingSource()
"""What the engine chose, without its gate weights."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Routing:
    """The experts of B samples, in the order asked for."""

    expert_ids: tuple[npt.NDArray[np.integer], ...]
    """Of each sample [tokens − 1, L, K], order of the top-k kept, as few bytes as fit."""
    expert_weights: tuple[npt.NDArray[np.float32], ...] | None
    """Of each sample [tokens − 1, L, K] gate weights, where they were asked for."""
    num_experts: int
    """Experts a layer."""


def read_routing(
    reader: TableSource,
    indices_B: npt.NDArray[np.int64],
    lengths_B: npt.NDArray[np.int64],
    source: RoutingSource = BY_ENGINE,
) -> Routing | None:
    """The routing of samples that `source` recorded; None where none of them has any.

    `lengths_B` are tokens of prompt and response. A sample with one segment is a view of the stored
    bytes, not a copy. Sparse-attention indices and other extras of an engine are not asked for.

    Raises NoLongerKept where routing of these samples was recorded and a rule of retention has
    retired it since; NotFound where some samples have routing and others, named, have none, or
    where weights are asked for and were not recorded; InvalidEvent, naming sample, segment, layer
    and position, for a hole, an overlap, bytes that do not fit their shape, an id that is no
    expert, an expert twice for a token, a layer that nobody captured, weights that are no numbers,
    or segments of different shape.
    """
    weights = source.weights
    table = _rows_of(reader, indices_B, source)
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
    gates = table.column("weights") if weights else None
    meta = table.select(_META).to_pylist()  # one row a segment, not a token
    first_of = np.searchsorted(row_index, indices_B)
    last_of = np.searchsorted(row_index, indices_B + 1)
    ids: list[npt.NDArray[np.integer]] = []
    gate_weights: list[npt.NDArray[np.float32]] = []
    for index, length, first, last in zip(
        indices_B.tolist(), lengths_B.tolist(), first_of.tolist(), last_of.tolist(), strict=True
    ):
        of_sample = range(first, last)
        _check_cover(reader, index, length, [meta[row] for row in of_sample], meta[0])
        parts = [_decode(meta[row], blobs[row].as_buffer()) for row in of_sample]
        ids.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if gates is not None:
            found = [_decode_weights(meta[row], gates[row]) for row in of_sample]
            gate_weights.append(found[0] if len(found) == 1 else np.concatenate(found))
    _check_one_expert(ids, meta[0])
    return Routing(
        expert_ids=tuple(ids),
        expert_weights=tuple(gate_weights) if weights else None,
        num_experts=meta[0]["num_experts"],
    )


def _rows_of(
    reader: TableSource, indices_B: npt.NDArray[np.int64], source: RoutingSource
) -> pa.Table:
    """The events of the samples by that recorder, in the order of samples and positions."""
    columns = [*_META, "branch", "expert_ids", *(["weights"] if source.weights else [])]
    table = reader.table("routing_recorded", columns)
    by_policy, version = table.column("policy_version"), source.policy_version
    by = pc.is_null(by_policy) if version is None else pc.equal(by_policy, version)
    chosen = select_rows(table.column("index"), indices_B) & pc.fill_null(by, False).to_numpy()
    if source.branch is not None:
        chosen &= pc.equal(table.column("branch"), source.branch).to_numpy()
    return table.filter(pa.array(chosen)).sort_by(
        [("index", "ascending"), ("start", "ascending"), ("segment", "ascending")]
    )


def _check_cover(
    reader: TableSource,
    index: int,
    length: int,
    parts: list[dict[str, Any]],
    like: dict[str, Any],
) -> None:
    """Raise unless the parts follow each other from 0 to the last token but one."""
    reached = 0
    for said in parts:
        for name in ("layers", "topk", "num_experts", "dtype"):
            if said[name] != like[name]:
                raise _invalid(
                    said, f"{name} {like[name]}, as sample {like['index']} has", said[name]
                )
        if said["start"] < reached:
            raise _invalid(
                said,
                f"the next rows at position {reached} of {length - 1}",
                f"an overlap: they start at {said['start']}",
            )
        if said["start"] > reached:
            _refuse_hole(reader, said, reached, said["start"], length)
        reached += said["rows"]
    if reached < length - 1:
        _refuse_hole(reader, parts[-1], reached, length - 1, length)
    if reached > length - 1:
        raise _invalid(
            parts[-1],
            f"{length - 1} rows: one for each of its {length} tokens but the last",
            reached,
        )


def _refuse_hole(
    reader: TableSource, said: dict[str, Any], first: int, last: int, length: int
) -> None:
    """Raise for positions first..last, and name the engine calls that they belong to."""
    index = said["index"]
    if isinstance(reader, Reader):
        reader.require_kept("routing_recorded", "index", [index])
    prompts = reader.table("prompt_issued", ["indices", "tokens"])
    counts = pc.list_value_length(prompts["indices"]).to_numpy()
    owner = np.repeat(np.arange(prompts.num_rows), counts)
    of_prompt = owner[pc.list_flatten(prompts["indices"]).to_numpy() == index]
    prompt = len(prompts["tokens"][int(of_prompt[0])]) if len(of_prompt) else 0
    segments = reader.table(
        "segment_generated", ["index", "segment", "turn", "start", "tokens", "finish_reason"]
    )
    segments = segments.filter(pc.equal(segments["index"], index)).sort_by("start")
    calls: list[tuple[dict[str, Any], int]] = []
    for row in segments.drop_columns(["tokens"]).to_pylist():
        tokens = segments["tokens"][len(calls)]
        # The rows of a call end with its last token but one: that is the last that it was fed.
        calls.append((row, prompt + row["start"] + len(tokens) - 1))
    before = 0
    named = []
    for row, end in calls:
        if before < last and end > first:
            call = f"segment {row['segment']} (turn {row['turn']}, {row['finish_reason']})"
            named.append(f"{call} ends at {end}")
        before = end
    raise _invalid(
        said | {"segment": None},
        _wanted(length),
        f"a hole: nothing for positions {first} to {last - 1}"
        + (f"; {'; '.join(named)}" if named else ""),
    )


def _decode(said: dict[str, Any], buffer: pa.Buffer) -> npt.NDArray[np.integer]:
    dtype = _DTYPES.get(said["dtype"])
    shape = (said["rows"], said["layers"], said["topk"])
    if dtype is None:
        raise _invalid(said, f"a dtype of {sorted(_DTYPES)}", said["dtype"])
    if buffer.size != int(np.prod(shape)) * dtype.itemsize:
        raise _invalid(said, f"{shape} ids of {dtype.itemsize} bytes", f"{buffer.size} bytes")
    ids: npt.NDArray[np.integer] = np.frombuffer(buffer, dtype).reshape(shape)
    if not ids.size:
        return ids
    if int(ids.max()) >= said["num_experts"]:
        row, layer = (int(i) for i in np.argwhere(ids >= said["num_experts"])[0][:2])
        raise _invalid(
            said,
            f"ids below {said['num_experts']}",
            f"{ids[row, layer].tolist()}, {_place(said, row, layer)}",
        )
    twice = repeated_expert(ids)
    if twice is not None:
        row, layer = twice
        zero = "" if ids[:, layer].any() else "; the whole layer is zero: nobody captured it"
        raise _invalid(
            said,
            f"{said['topk']} different experts of each token and layer",
            f"{ids[row, layer].tolist()}, {_place(said, row, layer)}{zero}",
        )
    return ids


def _decode_weights(said: dict[str, Any], stored: pa.Scalar) -> npt.NDArray[np.float32]:
    if not stored.is_valid:
        raise NotFound(
            explain(
                "loading the gate weights of a step",
                on=f"sample {said['index']}, segment {said['segment']}",
                expected="recorded gate weights, which --replay-routing-weights asks for",
                found="expert ids alone",
                do="sample with --record-routing-weights, or replay the ids alone",
            )
        )
    shape = (said["rows"], said["layers"], said["topk"])
    buffer = stored.as_buffer()
    if buffer.size != int(np.prod(shape)) * 4:
        raise _invalid(said, f"{shape} weights of 4 bytes", f"{buffer.size} bytes")
    weights: npt.NDArray[np.float32] = np.frombuffer(buffer, "<f4").reshape(shape)
    # A token whose experts all count nothing was never weighed.
    wrong = ~np.isfinite(weights).all(axis=2) | ~weights.any(axis=2)
    if wrong.any():
        row, layer = (int(i) for i in np.argwhere(wrong)[0])
        raise _invalid(
            said,
            "finite gate weights, some of them other than 0",
            f"{weights[row, layer].tolist()}, {_place(said, row, layer)}",
        )
    return weights


def _check_one_expert(ids: list[npt.NDArray[np.integer]], said: dict[str, Any]) -> None:
    """With one expert a token, only a layer that is zero for all samples shows as a hole."""
    if said["topk"] > 1 or said["num_experts"] == 1:
        return
    for layer in range(said["layers"]):
        if sum(len(each) for each in ids) > 1 and not any(each[:, layer].any() for each in ids):
            raise InvalidEvent(
                explain(
                    "putting the routing of a step together",
                    on=f"layer {layer}",
                    expected=f"tokens that go to several of {said['num_experts']} experts",
                    found="expert 0 for every token of every sample",
                    do="nobody captured this layer; train these samples with --use-routing-replay "
                    "(experts by the old policy) or --no-use-rollout-routing-replay",
                )
            )


def _wanted(length: int) -> str:
    return f"{length - 1} rows: one for each of its {length} tokens but the last"


def _place(said: dict[str, Any], row: int, layer: int) -> str:
    return f"layer {layer}, position {said['start'] + row}"


def _invalid(said: dict[str, Any], expected: object, found: object) -> InvalidEvent:
    on = f"sample {said['index']}"
    if said["policy_version"] is not None:
        on += f", recorded by the policy of version {said['policy_version']}"
    elif said["segment"] is not None:
        on += f", segment {said['segment']}"
    return InvalidEvent(
        explain(
            "putting the routing of a sample together",
            on=on,
            expected=expected,
            found=found,
            do="a missing turn, an aborted call or a pipeline stage that was not captured leaves "
            "such a hole; this sample cannot be trained with routing replay",
        )
    )
