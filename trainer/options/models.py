"""Options of the models beside the policy: the critic, and the old actor."""

from __future__ import annotations

from trainer.options.option import Option
from trainer.ranges import LARGEST, above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "critic_lr",
        "optimizer",
        float,
        None,
        "learning rate of the critic; default: as --lr",
        within=at_least(0),
    ),
    Option(
        "critic_lr_warmup_iters",
        "optimizer",
        int,
        0,
        "steps of the critic's warm-up",
        within=at_least(0, LARGEST),
    ),
    Option(
        "reset_optimizer_states",
        "optimizer",
        bool,
        False,
        "forget Adam's moments and step count before each rollout step",
    ),
    Option(
        "value_clip",
        "algorithm",
        float,
        0.2,
        "how far a value may move from what the critic said before the rollout",
        within=above(0),
    ),
    Option(
        "num_critic_only_steps",
        "algorithm",
        int,
        0,
        "first rollout steps in which the critic alone is trained",
        within=at_least(0, LARGEST),
    ),
    Option(
        "keep_old_actor",
        "algorithm",
        bool,
        False,
        "old log-probs are by the weights that the engine had, kept in the trainer (see "
        "--update-weights-interval)",
    ),
)
