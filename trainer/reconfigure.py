"""Going on with other optimizer settings: what has been learned stays, the rules change."""

from __future__ import annotations

from trainer.settings import OptimizerSettings
from trainer.state import TrainState, check_settings, make_optimizer, make_scheduler

__all__ = ["reconfigure"]


def reconfigure(state: TrainState, settings: OptimizerSettings) -> None:
    """Give `state` another learning rate, schedule, decay, betas or clipping, in place.

    Weights, Adam's moments and step count, and the schedule's position stay, bit for bit. With
    equal settings nothing is touched. Raises InvalidArgument for settings that cannot work; the
    state is then as it was.
    """
    if settings == state.settings:
        return
    check_settings(settings)
    position = state.scheduler.num_steps
    held = {
        id(parameter): (inner.state.get(parameter), group.get("step"))
        for inner in state.inner_optimizers()
        for group in inner.param_groups
        for parameter in group["params"]
    }
    state.optimizer = make_optimizer(settings, state.chunks)
    for inner in state.inner_optimizers():
        for group in inner.param_groups:
            for parameter in group["params"]:
                moments, step = held[id(parameter)]
                if moments is not None:
                    inner.state[parameter] = moments
                if step is not None:
                    group["step"] = step
    state.scheduler = make_scheduler(settings, state.optimizer)
    state.scheduler.num_steps = position
    state.scheduler.step(0)
    state.settings = settings
