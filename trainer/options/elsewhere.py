"""Options of a trainer and of rollouts that are processes of their own, and meet in the ledger."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import above

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "rollout_by",
        "rollout",
        str,
        "trainer",
        "who makes the rollouts: the trainer's own process, or ledger-rollout ('elsewhere'), whose "
        "samples are trained on as they land in the ledger",
        content=False,
        choices=("trainer", "elsewhere"),
    ),
    place(
        "layout",
        "parallelism",
        str,
        None,
        "file that says where engines, rollout workers and trainer ranks go on Ray (docs/ray.md); "
        "it stands for --launcher ray, --actor-num-nodes and --actor-num-gpus-per-node",
    ),
    place(
        "rollout_timeout_minutes",
        "rollout",
        float,
        None,
        "how long trainer or rollouts wait for the other while the run gets no event; default: as "
        "long as it takes",
        within=above(0),
    ),
    place(
        "update_weight_disk_keep",
        "rollout",
        int,
        2,
        "versions that stay in --update-weight-disk-dir for rollouts made elsewhere: the newest",
        within=COUNT,
    ),
)
