"""Options of routing replay, for models with a mixture of experts."""

from __future__ import annotations

from trainer.options.option import Option

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "use_rollout_routing_replay",
        "routing",
        bool,
        None,
        "replay the experts that the engine chose while it sampled; on unless "
        "--use-routing-replay is given, and switched off by its --no- form: then the routers "
        "choose anew in each forward",
    ),
    Option(
        "use_routing_replay",
        "routing",
        bool,
        False,
        "replay the experts that the policy chose in a forward before the first step of the "
        "rollout, which are recorded",
    ),
    Option(
        "record_routing_weights",
        "routing",
        bool,
        False,
        "record the gate weights (float32) beside the expert ids",
    ),
    Option(
        "replay_routing_weights",
        "routing",
        bool,
        False,
        "replay the recorded gate weights too: the routers get no gradient (implies "
        "--record-routing-weights)",
    ),
)
