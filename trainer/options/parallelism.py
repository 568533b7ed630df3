"""Options of process groups, threads and determinism."""

from __future__ import annotations

from trainer.options.option import COUNT, Option
from trainer.ranges import at_least

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
