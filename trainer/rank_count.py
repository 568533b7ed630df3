"""How many ranks a training needs: from the layout, the command line, and what is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["ranks_of", "with_ranks"]


def ranks_of(values: Mapping[str, Any]) -> int:
    """Number of ranks; `values` are complete, as `with_ranks` leaves them."""
    return int(values["actor_num_nodes"]) * int(values["actor_num_gpus_per_node"])


def with_ranks(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the data-parallel size and the number of ranks, each following the other.

    Ranks = data-parallel size × tensor × pipeline × context parallel size. Without either the
    data-parallel size is 1. Raises InvalidArgument where they contradict each other.
    """
    full = dict(values)
    sizes = {
        name: full[f"{name}_parallel_size"]
        for name in ("tensor_model", "pipeline_model", "context")
    }
    of_model = sizes["tensor_model"] * sizes["pipeline_model"] * sizes["context"]
    nodes, per_node = full["actor_num_nodes"], full["actor_num_gpus_per_node"]
    if nodes is None and per_node is None:
        full["data_parallel_size"] = full["data_parallel_size"] or 1
        full["actor_num_nodes"] = 1
        full["actor_num_gpus_per_node"] = full["data_parallel_size"] * of_model
        return full
    full["actor_num_nodes"], full["actor_num_gpus_per_node"] = nodes or 1, per_node or 1
    ranks = ranks_of(full)
    if full["data_parallel_size"] is None:
        full["data_parallel_size"] = max(1, ranks // of_model)
    needed = full["data_parallel_size"] * of_model
    if needed != ranks:
        shown = " × ".join(f"{size} ({name})" for name, size in sizes.items() if size != 1)
        raise InvalidArgument(
            explain(
                "laying out the training",
                on="ranks = data parallel × tensor × pipeline × context parallel size",
                expected=f"{needed} ranks: {full['data_parallel_size']} (data)"
                + (f" × {shown}" if shown else ""),
                found=f"{ranks}: {full['actor_num_nodes']} nodes × "
                f"{full['actor_num_gpus_per_node']}",
                do="start as many ranks as the layout needs (--actor-num-nodes, "
                "--actor-num-gpus-per-node, or torchrun), or change the layout; a run that goes "
                "on keeps the layout that it began with",
            )
        )
    return full
