"""Expert ids between numpy arrays and the event that holds them as bytes, exactly."""

from __future__ import annotations

import numpy as np

from ledger.encode import refuse
from ledger.events import RoutingRecorded

__all__ = [
    "BY_POLICY",
    "MOST_EXPERTS",
    "expert_dtype",
    "expert_ids_of",
    "expert_weights_of",
    "repeated_expert",
    "routing_of",
]

MOST_EXPERTS = 1 << 16

BY_POLICY = -1
"""`segment` of an event that no engine call reported: the trainer's policy chose the experts."""


def expert_dtype(num_experts: int) -> str:
    """The smallest type of an expert id: 'uint8' up to 256 experts, else 'uint16'.

    Raises:
        InvalidEvent: there are none, or more than two bytes can tell apart.
    """
    if not 1 <= num_experts <= MOST_EXPERTS:
        refuse("routing_recorded", 0, "num_experts", f"from 1 to {MOST_EXPERTS}", num_experts)
    return "uint8" if num_experts <= 256 else "uint16"


def routing_of(
    expert_ids: np.ndarray,
    *,
    num_experts: int,
    index: int,
    segment: int,
    start: int = 0,
    weights: np.ndarray | None = None,
    policy_version: int | None = None,
) -> RoutingRecorded:
    """The event of the experts that tokens were sent to; no id is changed, in as few bytes as fit.

    `expert_ids` [rows, layers, topk] of any integer dtype, ids from 0 to num_experts − 1, in the
    order of the top-k; `weights` [rows, layers, topk] float32 gate weights. With `policy_version`
    they were chosen by the trainer's policy of that version, and `segment` is BY_POLICY.

    Raises:
        InvalidEvent: another shape or dtype, or an id out of range.
    """
    kind, dtype = "routing_recorded", expert_dtype(num_experts)
    if expert_ids.ndim != 3 or expert_ids.dtype.kind not in "iu":
        found = f"{expert_ids.dtype} {list(expert_ids.shape)}"
        refuse(kind, 0, "expert_ids", "integers [rows, layers, topk]", found)
    if expert_ids.size:
        for extreme in (int(expert_ids.min()), int(expert_ids.max())):
            if not 0 <= extreme < num_experts:
                refuse(kind, 0, "expert_ids", f"ids from 0 to {num_experts - 1}", extreme)
    if weights is not None and (weights.shape != expert_ids.shape or weights.dtype != np.float32):
        found = f"{weights.dtype} {list(weights.shape)}"
        refuse(kind, 0, "weights", f"float32 {list(expert_ids.shape)}", found)
    rows, layers, topk = expert_ids.shape
    return RoutingRecorded(
        index=index,
        segment=segment,
        start=start,
        rows=rows,
        layers=layers,
        topk=topk,
        num_experts=num_experts,
        dtype=dtype,
        expert_ids=expert_ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes(),
        weights=None if weights is None else weights.astype("<f4").tobytes(),
        policy_version=policy_version,
    )


def expert_ids_of(event: RoutingRecorded) -> np.ndarray:
    """The ids of an event, [rows, layers, topk], read-only, in the dtype that it names."""
    dtype = np.dtype(event.dtype).newbyteorder("<")
    return np.frombuffer(event.expert_ids, dtype).reshape(event.rows, event.layers, event.topk)


def expert_weights_of(event: RoutingRecorded) -> np.ndarray | None:
    """The gate weights of an event, float32 [rows, layers, topk], read-only; None without any."""
    if event.weights is None:
        return None
    return np.frombuffer(event.weights, "<f4").reshape(event.rows, event.layers, event.topk)


def repeated_expert(expert_ids: np.ndarray) -> tuple[int, int] | None:
    """The first (row, layer) of ids [rows, layers, topk] where neighbours in the top-k are equal.

    A router never chooses an expert twice, so such ids are not what a router chose: a layer that
    nobody captured is full of zeros. It looks at neighbours only, at the speed of reading the ids,
    and so finds constant rows and misses [3, 5, 3]; `trainer.routing_replay` looks at all pairs.
    """
    _, layers, topk = expert_ids.shape
    if topk < 2 or not expert_ids.size:
        return None
    flat = expert_ids.reshape(-1)
    equal = flat[1:] == flat[:-1]
    equal[topk - 1 :: topk] = False  # the last of one layer beside the first of the next
    if not equal.any():
        return None
    at = int(equal.argmax()) // topk
    return at // layers, at % layers
