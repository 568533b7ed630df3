"""Where Megatron's optimizer keeps what belongs to a parameter of the model.

In float32 the inner optimizer steps the parameters themselves. With bfloat16 it steps float32
copies of them (main weights), and a distributed optimizer steps, on each data-parallel rank, one
run of the flattened parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["MAIN", "MOMENTS", "Slot", "inner_optimizers", "slots_of"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments, by their names in the optimizer's state."""
MAIN = "main_weight"
"""The float32 main weights, where the model's are of 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One parameter's place in the optimizer of this rank."""

    parameter: Any
    """The model's."""
    inner: torch.optim.Optimizer
    held: Any
    """What `inner` steps: the parameter, its float32 copy, or a run of either, flattened; None
    where this rank steps nothing of it."""
    start: int
    """First element of the flattened parameter that `held` is about."""
    stop: int
    group: Any
    """The data-parallel ranks that share the parameter out, or None."""

    @property
    def has_main(self) -> bool:
        """Whether the optimizer holds float32 main weights beside the parameter."""
        return bool(self.parameter.dtype != torch.float32)

    def state(self) -> dict[str, Any]:
        """The state of `held` in the inner optimizer; empty before the first step."""
        return {} if self.held is None else self.inner.state.get(self.held, {})

    def whole(self, name: str) -> Tensor:
        """A moment or main weight, float32 in the parameter's shape, zero where nobody has one.

        Collective over `group`: every rank of it gets all of it, bit for bit.
        """
        flat = torch.zeros(self.parameter.numel(), device=self.parameter.device)
        mine = self.held if name == MAIN else self.state().get(name)
        if mine is not None:
            flat[self.start : self.stop] = mine.detach().reshape(-1)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            # Sums of bits, each of which one rank alone has set: −0.0 stays what it is.
            dist.all_reduce(flat.view(torch.uint8), group=self.group)
        return flat.view(self.parameter.shape)

    def run(self, whole: Tensor) -> Tensor:
        """This rank's run of something of the parameter's shape, in the shape of `held`."""
        return whole.reshape(-1)[self.start : self.stop].view(self.held.shape)


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron's, in its order."""
    return [one.optimizer for one in _chained(optimizer) if one.optimizer is not None]


def _chained(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def slots_of(optimizer: Any) -> dict[int, Slot]:
    """id of each parameter of the model → its slot."""
    return {id(slot.parameter): slot for one in _chained(optimizer) for slot in _slots(one)}


def _slots(one: Any) -> Iterator[Slot]:
    if one.optimizer is None:
        return
    if hasattr(one, "model_param_group_index_map"):
        yield from _distributed(one)
    elif hasattr(one, "fp32_from_float16_groups"):
        for models, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                yield Slot(model, one.optimizer, main, 0, main.numel(), None)
        for group in one.fp32_from_fp32_groups:
            for parameter in group:
                yield Slot(parameter, one.optimizer, parameter, 0, parameter.numel(), None)
    else:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                yield Slot(parameter, one.optimizer, parameter, 0, parameter.numel(), None)


def _distributed(one: Any) -> Iterator[Slot]:
    for buffer in one.buffers:
        for parameter in buffer.param_index_map:
            place = one.model_param_group_index_map.get(parameter)
            if place is None:
                yield Slot(parameter, one.optimizer, None, 0, 0, one.data_parallel_group)
                continue
            group, order = place
            run = one._get_model_param_range_map(parameter)["param"]
            held = one.optimizer.param_groups[group]["params"][order]
            yield Slot(parameter, one.optimizer, held, run.start, run.end, one.data_parallel_group)
