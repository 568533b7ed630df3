"""Options of partial and asynchronous rollouts, by the names of slime and Miles."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import LARGEST, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "partial_rollout",
        "rollout",
        bool,
        False,
        "when enough groups are kept, cut the samples that still run; they go on in the next "
        "rollout step with the tokens they have",
    ),
    Option(
        "fully_async",
        "rollout",
        bool,
        False,
        "go on generating while the trainer trains; see --max-weight-staleness",
    ),
    Option(
        "max_weight_staleness",
        "rollout",
        int,
        None,
        "with --partial-rollout or --fully-async: weight versions from the oldest one that sampled "
        "a token of a group to the one that trains on it, at most; unset: no bound",
        within=at_least(0, LARGEST),
    ),
    Option(
        "async_unused_samples_handler",
        "rollout",
        str,
        "retry",
        "what becomes of the prompt of a group above --max-weight-staleness: issued again "
        "('retry'), or not ('drop')",
        choices=("retry", "drop"),
    ),
    Option(
        "max_sample_retries",
        "rollout",
        int,
        2,
        "how often the prompt of a group is issued again when a sample of it failed",
        within=at_least(0, LARGEST),
    ),
    place(
        "async_max_concurrent_samples",
        "rollout",
        int,
        None,
        "with --fully-async: samples on their way at a time at most",
        within=COUNT,
    ),
    place(
        "async_data_buffer_capacity_factor",
        "rollout",
        float,
        3.0,
        "with --fully-async: rollout batches that are finished or on their way at most",
        within=at_least(1),
    ),
)
