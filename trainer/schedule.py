"""Runs micro-batches through Megatron's schedule, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from trainer.megatron import get_forward_backward_func, unwrap
from trainer.microbatch import MicroBatch

__all__ = ["ForwardStep", "run_schedule"]

ForwardStep = Callable[[Iterator[MicroBatch], Any], tuple[Tensor, Callable[..., Any]]]
"""Takes the next micro-batch and a stage of the model; gives its output and what makes of it a loss
and anything else."""


def run_schedule(
    forward_step: ForwardStep,
    chunks: Sequence[Any],
    micros: Sequence[MicroBatch],
    *,
    forward_only: bool,
) -> list[Any]:
    """What the forward steps gave besides their loss, in the order of `micros`; empty on stages
    other than the last. `chunks` are this rank's stages of the model, `micros` its micro-batches.

    With `forward_only` nothing is differentiated.
    """
    packed = micros[0].sequence_starts is not None
    for chunk in chunks:
        # Stages tell each other the shape of what they send.
        unwrap(chunk).config.variable_seq_lengths = packed
    made: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks] if len(chunks) > 1 else iter(micros),
        model=list(chunks),
        num_microbatches=len(micros),
        seq_length=micros[0].tokens_BT.shape[1],
        micro_batch_size=micros[0].tokens_BT.shape[0],
        forward_only=forward_only,
    )
    return made
