"""Checks of process groups and of the pair itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trainer.megatron import parallel_state


def group_sizes() -> dict[str, int]:
    """Sizes of the groups that this rank is in, and its number in the world."""
    return {
        "rank": dist.get_rank(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def sum_over_ranks(value: float) -> float:
    """`value` times one more than each rank, added up."""
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return float(total)
