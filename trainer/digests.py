"""Records and digests of tensors and random generators, by canonical names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ledger.canonical import json_digest
from ledger.weights import TensorRecord, tensor_record, weights_root
from trainer.megatron import get_cuda_rng_tracker

__all__ = [
    "optimizer_root",
    "random_state",
    "random_state_root",
    "record_of",
    "records_of",
    "restore_random_state",
]


def record_of(name: str, tensor: Tensor) -> TensorRecord:
    """Name, dtype, shape and blake3 of the contiguous little-endian bytes of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tensor_record(name, dtype, tuple(tensor.shape), _bytes_of(tensor))


def records_of(named: Iterable[tuple[str, Tensor]]) -> list[TensorRecord]:
    """One record a tensor, in the order given. One tensor is held at a time."""
    return [record_of(name, tensor) for name, tensor in named]


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """uint8 [n]; shares memory with a contiguous tensor on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: np.ndarray = flat.view(torch.uint8).numpy()
    return data


def optimizer_root(
    moments: Iterable[TensorRecord], step: int, scheduler: Mapping[str, Any]
) -> bytes:
    """blake3 (32 bytes) over Adam's moments by canonical name, its step count and the scheduler."""
    root = weights_root(moments)
    return json_digest({"moments": root.hex(), "step": step, "scheduler": dict(scheduler)})


def random_state() -> dict[str, Tensor]:
    """The states of all generators a step can draw from, by name (uint8, 1-D): torch's on the CPU
    and on the device, and those that Megatron tracks."""
    states = {"torch.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"megatron.{name}"] = state
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Set every generator to a state that `random_state` gave. Names must be the same set."""
    torch.set_rng_state(states["torch.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch.cuda"])
    get_cuda_rng_tracker().set_states(
        {
            name.removeprefix("megatron."): state
            for name, state in states.items()
            if name.startswith("megatron.")
        }
    )


def random_state_root(states: Mapping[str, Tensor]) -> bytes:
    """blake3 (32 bytes) over generator states by name."""
    return weights_root(records_of(states.items()))
