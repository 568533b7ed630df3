"""Options of the optimizer and its schedule."""

from __future__ import annotations

from trainer.options.option import COUNT, Option
from trainer.ranges import LARGEST, Range, above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option("lr", "optimizer", float, 1e-6, "learning rate", within=at_least(0)),
    Option(
        "min_lr",
        "optimizer",
        float,
        0.0,
        "learning rate at the end of the decay",
        within=at_least(0),
    ),
    Option(
        "lr_decay_style",
        "optimizer",
        str,
        "constant",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    ),
    Option("lr_decay_iters", "optimizer", int, None, "steps of the decay", within=COUNT),
    Option(
        "lr_warmup_iters", "optimizer", int, 0, "steps of the warm-up", within=at_least(0, LARGEST)
    ),
    Option("weight_decay", "optimizer", float, 0.0, "weight decay", within=at_least(0)),
    Option(
        "adam_beta1",
        "optimizer",
        float,
        0.9,
        "Adam's beta1",
        within=Range(low=0, high=1, without_high=True),
    ),
    Option(
        "adam_beta2",
        "optimizer",
        float,
        0.98,
        "Adam's beta2",
        within=Range(low=0, high=1, without_high=True),
    ),
    Option("adam_eps", "optimizer", float, 1e-8, "Adam's epsilon", within=above(0)),
    Option(
        "clip_grad", "optimizer", float, 1.0, "largest gradient norm; 0 is off", within=at_least(0)
    ),
    Option(
        "use_distributed_optimizer",
        "optimizer",
        bool,
        False,
        "shard the optimizer state over data-parallel ranks",
    ),
)
