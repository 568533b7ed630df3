"""Going on with other optimizer settings: what has been learned stays, the rules change."""

from __future__ import annotations

import torch

from ledger.errors import InvalidArgument, explain
from trainer.optimizer_slots import slots_of
from trainer.settings import OptimizerSettings
from trainer.state import TrainState, check_settings, make_optimizer, make_scheduler

__all__ = ["reconfigure"]


def reconfigure(state: TrainState, settings: OptimizerSettings) -> None:
    """Give `state` another learning rate, schedule, decay, betas or clipping, in place.

    Weights, main weights, Adam's moments and step count, and the schedule's position stay, bit for
    bit. With equal settings nothing is touched. Raises InvalidArgument for settings that cannot
    work; the state is then as it was.
    """
    if settings == state.settings:
        return
    check_settings(settings)
    if settings.use_distributed_optimizer != state.settings.use_distributed_optimizer:
        raise InvalidArgument(
            explain(
                "changing the optimizer's settings",
                on="--use-distributed-optimizer",
                expected="as the state was laid out",
                found=settings.use_distributed_optimizer,
                do="start from a checkpoint with it",
            )
        )
    position, step = state.scheduler.num_steps, state.adam_step()
    before = slots_of(state.optimizer)
    # Fused implementations on a GPU keep the count in the group.
    in_groups = any(
        "step" in group for inner in state.inner_optimizers() for group in inner.param_groups
    )
    state.optimizer = make_optimizer(settings, state.chunks, state.parallel)
    for key, slot in slots_of(state.optimizer).items():
        if slot.held is None:
            continue
        if slot.has_main:
            with torch.no_grad():
                slot.held.copy_(before[key].held)
        if before[key].state():
            slot.inner.state[slot.held] = before[key].state()
    if in_groups:
        for inner in state.inner_optimizers():
            for group in inner.param_groups:
                group["step"] = step
    state.scheduler = make_scheduler(settings, state.optimizer)
    state.scheduler.num_steps = position
    state.scheduler.step(0)
    state.settings = settings
