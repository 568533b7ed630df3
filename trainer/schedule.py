"""Runs micro-batches through Megatron's schedules, with a pipeline or without.

One call for training and for scoring, so that both take the same micro-batches in the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.context_parallel import context_part, with_even_sequences
from trainer.megatron import get_forward_backward_func, parallel_state, unwrap
from trainer.microbatch import PADDING_ID, MicroBatch

__all__ = ["ForwardStep", "run_schedule", "widened_to"]

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

    With `forward_only` nothing is differentiated; otherwise the gradients are complete on return.
    Where the layout wants rows of other widths, forward steps see the micro-batches with more
    padding on the right, and nothing else changes; with context parallelism, this rank's part.

    Raises InvalidArgument where the layout cannot take these micro-batches.
    """
    config = unwrap(chunks[0]).config
    context = config.context_parallel_size
    micros = [_for_layout(micro, config) for micro in micros]
    _check(config, micros, len(chunks))
    for chunk in chunks:
        # Stages tell each other the shape of what they send.
        unwrap(chunk).config.variable_seq_lengths = len({m.tokens_BT.shape for m in micros}) > 1
    made: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks] if len(chunks) > 1 else iter(micros),
        model=list(chunks),
        num_microbatches=len(micros),
        seq_length=micros[0].tokens_BT.shape[1] * context,
        micro_batch_size=micros[0].tokens_BT.shape[0],
        forward_only=forward_only,
    )
    return made


def _for_layout(micro: MicroBatch, config: Any) -> MicroBatch:
    """The micro-batch, or this rank's part of it, in a width that the layout can divide."""
    # Under sequence parallelism each rank of the group has an equal run of the sequence.
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    size = config.context_parallel_size
    if size == 1:
        return widened_to(micro, multiple)
    even = 2 * size
    if micro.sequence_starts is None:
        micro = widened_to(micro, even * multiple)
    else:
        micro = with_even_sequences(micro, even, even * multiple)
    return context_part(micro, int(parallel_state.get_context_parallel_rank()), size)


def widened_to(micro: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with rows of the next multiple of `multiple` tokens, padded on the right."""
    width = micro.tokens_BT.shape[1]
    extra = -width % multiple
    if not extra:
        return micro
    positions_BT = np.pad(micro.positions_BT, ((0, 0), (0, extra)))
    if micro.sequence_starts is None:
        positions_BT[:, width:] = np.arange(width, width + extra)
    experts = _padded(micro.expert_ids, extra)
    if experts is not None:
        experts[:, width:] = np.arange(experts.shape[-1])  # any experts, but different ones
    weights = _padded(micro.expert_weights, extra)
    if weights is not None:
        weights[:, width:] = 1 / weights.shape[-1]
    return replace(
        micro,
        tokens_BT=np.pad(micro.tokens_BT, ((0, 0), (0, extra)), constant_values=PADDING_ID),
        positions_BT=positions_BT,
        columns_n=micro.columns_n // width * (width + extra) + micro.columns_n % width,
        expert_ids=experts,
        expert_weights=weights,
        routed_BT=_padded(micro.routed_BT, extra),
    )


def _only_p2p(kinds: str | list[str] | None) -> bool:
    """Whether Megatron's cp_comm_type, of all layers or of each, is "p2p" (None: it is)."""
    return set([kinds] if isinstance(kinds, str) else kinds or ()) <= {"p2p"}


def _padded(values: Any, extra: int) -> Any:
    """[B, T, …] with `extra` columns of zeros behind; None stays None."""
    if values is None:
        return None
    return np.pad(values, ((0, 0), (0, extra), *((0, 0),) * (values.ndim - 2)))


def _check(config: Any, micros: Sequence[MicroBatch], n_chunks: int) -> None:
    packed = any(micro.sequence_starts is not None for micro in micros)
    experts_divided = config.expert_model_parallel_size > 1
    if packed and experts_divided and config.moe_token_dispatcher_type == "allgather":
        raise _wrong(
            "--moe-token-dispatcher-type",
            "alltoall with --use-dynamic-batch-size: all-gather wants as many tokens on each rank",
            "allgather",
        )
    if packed and config.context_parallel_size > 1 and not _only_p2p(config.cp_comm_type):
        raise _wrong(
            "--cp-comm-type",
            "p2p with --use-dynamic-batch-size: the others take packed rows in some versions of "
            "TransformerEngine only",
            config.cp_comm_type,
        )
    pipeline = config.pipeline_model_parallel_size
    if n_chunks > 1 and len(micros) % pipeline:
        raise _wrong(
            "--num-virtual-stages-per-pipeline-rank",
            f"a multiple of {pipeline} micro-batches on each data-parallel rank: an interleaved "
            "pipeline takes them in groups of its ranks",
            len(micros),
            "change --micro-batch-size or --global-batch-size",
        )


def _wrong(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("running micro-batches", on=on, expected=expected, found=found, do=do)
    )
