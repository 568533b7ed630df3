"""Options of the sizes of a step and its micro-batches."""

from __future__ import annotations

from trainer.options.option import COUNT, Option
from trainer.ranges import LARGEST, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "global_batch_size",
        "batch",
        int,
        None,
        "samples of an optimizer step; default: what a rollout step makes, divided by "
        "--num-steps-per-rollout",
        within=COUNT,
    ),
    Option(
        "num_steps_per_rollout",
        "batch",
        int,
        1,
        "optimizer steps of a rollout step",
        within=COUNT,
    ),
    Option(
        "micro_batch_size",
        "batch",
        int,
        8,
        "rows of a micro-batch, at most --global-batch-size",
        within=COUNT,
    ),
    Option(
        "seq_length",
        "batch",
        int,
        None,
        "tokens a row; default: the longest sample of the step",
        within=at_least(2, LARGEST),
    ),
)
