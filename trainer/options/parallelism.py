"""Options of process groups, threads and determinism."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "tensor_model_parallel_size", "parallelism", int, 1, "tensor parallel size", within=COUNT
    ),
    Option(
        "pipeline_model_parallel_size",
        "parallelism",
        int,
        1,
        "pipeline parallel size",
        within=COUNT,
    ),
    Option("context_parallel_size", "parallelism", int, 1, "context parallel size", within=COUNT),
    Option(
        "expert_model_parallel_size", "parallelism", int, 1, "expert parallel size", within=COUNT
    ),
    Option(
        "expert_tensor_parallel_size",
        "parallelism",
        int,
        None,
        "tensor parallel size inside experts",
        within=COUNT,
    ),
    Option(
        "data_parallel_size",
        "parallelism",
        int,
        None,
        "data parallel size; default: what the ranks leave beside the other sizes",
        within=COUNT,
    ),
    place(
        "actor_num_nodes",
        "parallelism",
        int,
        None,
        "hosts whose processes train; default: 1, or as torchrun says",
        within=COUNT,
    ),
    place(
        "actor_num_gpus_per_node",
        "parallelism",
        int,
        None,
        "ranks on each host, one a GPU (on CPUs one a process); default: what the layout needs, "
        "or as torchrun says",
        within=COUNT,
    ),
    Option(
        "launcher",
        "parallelism",
        str,
        "torchrun",
        "who starts several ranks where nobody has: torch's launcher in this command, on this "
        "host, or Ray, on a cluster (RAY_ADDRESS) or one of its own",
        content=False,
        choices=("torchrun", "ray"),
    ),
    place(
        "distributed_timeout_minutes",
        "parallelism",
        float,
        30.0,
        "how long a collective waits for a rank",
        within=above(0),
    ),
    Option(
        "num_threads",
        "parallelism",
        int,
        1,
        "CPU threads of an operation, pinned and recorded",
        within=at_least(1, 1024),
    ),
    Option(
        "deterministic_mode",
        "parallelism",
        bool,
        True,
        "bitwise repeatable operations; on by default",
    ),
)
