"""What the ranks of a step tell each other: the tokens that each computed, and decisions.

Every rank loads the same batch and runs its own micro-batches. What came out of them is shared bit
for bit, so that every rank goes on with the same arrays and builds the same events; the writer
alone appends them. With one process every function here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer.megatron import parallel_state
from trainer.parallel import device

__all__ = [
    "add_up",
    "all_gather_object",
    "broadcast_object",
    "by_all",
    "by_writer",
    "data_parallel_rank",
    "data_parallel_size",
    "is_last_stage",
    "is_writer",
    "share",
    "world_size",
]

_T = TypeVar("_T")

_PART_BYTES = 64 << 20
"""What is added up in one piece: on a GPU it takes its memory."""


def world_size() -> int:
    """Number of ranks; 1 before the process groups are started."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_writer() -> bool:
    """Whether this rank appends events: global rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def data_parallel_rank() -> int:
    """Which share of the micro-batches is this rank's."""
    return int(parallel_state.get_data_parallel_rank())


def data_parallel_size() -> int:
    """Number of shares that the micro-batches of a step are divided into."""
    return int(parallel_state.get_data_parallel_world_size()) if dist.is_initialized() else 1


def is_last_stage() -> bool:
    """Whether this rank holds the end of the model, where log-probabilities come out."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def share(values: npt.NDArray[Any], own: Sequence[slice]) -> npt.NDArray[Any]:
    """The whole array from the parts that the data-parallel ranks computed, on every rank.

    `values` has the shape and dtype of the whole on every rank; this rank's last pipeline stage
    filled the places `own` of it, and no other rank of its data-parallel group did. What the other
    places hold does not matter, nor what another stage hands in. Bits are kept: −0.0, NaN payloads.
    """
    if world_size() == 1:
        return values
    mine = np.zeros_like(values)
    for place in own:
        mine[place] = values[place]
    # Sums of bits, each place of which one rank alone has set.
    bits = torch.from_numpy(np.ascontiguousarray(mine).reshape(-1).view(np.uint8).astype(np.int32))
    bits = bits.to(device())
    if data_parallel_size() > 1 and is_last_stage():
        dist.all_reduce(bits, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            bits,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    whole = bits.cpu().numpy().astype(np.uint8).view(values.dtype)
    return whole.reshape(values.shape)


def add_up(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The whole array on every rank, from arrays of which one rank alone has set each place.

    The others have zero there. Bits are kept.
    """
    if world_size() == 1:
        return values
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
    for first in range(0, len(flat), _PART_BYTES):
        # Sums of bytes, each of which one rank alone has set.
        part = flat[first : first + _PART_BYTES]
        moved = part.to(device())
        dist.all_reduce(moved)
        part.copy_(moved)
    return flat.numpy().view(values.dtype).reshape(values.shape)


def broadcast_object(value: _T, *, source: int = 0) -> _T:
    """`value` of the rank `source` (global), on every rank. It is pickled."""
    if world_size() == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, src=source, device=device())
    received: _T = held[0]
    return received


def all_gather_object(value: _T) -> list[_T]:
    """The values of all ranks, in the order of their global ranks. They are pickled."""
    if world_size() == 1:
        return [value]
    held: list[Any] = [None] * world_size()
    dist.all_gather_object(held, value)
    return held


def by_writer(work: Callable[[], _T]) -> _T:
    """What `work` gives on rank 0, on every rank. Where it raises, every rank raises the same."""
    if world_size() == 1:
        return work()
    outcome: tuple[_T | None, Exception | None] = (None, None)
    if is_writer():
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
    value, failure = broadcast_object(outcome)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None only with a failure, or as the work's own


def by_all(work: Callable[[], _T]) -> list[_T]:
    """What `work` gives on each rank, on every rank. Where it raises on one, all raise the same."""
    if world_size() == 1:
        return [work()]
    outcome: tuple[_T | None, Exception | None]
    try:
        outcome = (work(), None)
    except Exception as error:
        outcome = (None, error)
    outcomes = all_gather_object(outcome)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # as above
