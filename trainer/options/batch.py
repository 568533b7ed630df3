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
        "rollouts of an optimizer step (siblings of one rollout count once); default: what a "
        "rollout step makes, divided by --num-steps-per-rollout",
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
    Option(
        "use_dynamic_batch_size",
        "batch",
        bool,
        False,
        "micro-batches by tokens: samples one after the other in one row, without padding; "
        "--micro-batch-size is not used then",
    ),
    Option(
        "max_tokens_per_gpu",
        "batch",
        int,
        None,
        "with --use-dynamic-batch-size: tokens of a micro-batch at most, times the context "
        "parallel size; a longer sample gets a micro-batch of its own",
        within=COUNT,
    ),
    Option(
        "balance_data",
        "batch",
        bool,
        False,
        "data-parallel ranks get samples of about as many tokens each (always so with "
        "--use-dynamic-batch-size)",
    ),
)
