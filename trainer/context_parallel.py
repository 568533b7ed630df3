"""Context parallelism: each rank of a group has a part of every sequence.

A sequence is cut into 2·size chunks of one length, and rank r takes chunks r and 2·size − 1 − r:
under a causal mask all ranks have as many pairs of tokens to attend to. It is the order that
Megatron's rotary embedding and TransformerEngine's attention expect of their inputs
(megatron/core/utils.py, `get_batch_on_this_cp_rank`; packed rows: every sequence of the row by
itself, as TransformerEngine's `thd_get_partitioned_indices`).

Attention alone looks at other tokens, and is TransformerEngine's. What each rank computed for its
response tokens is put together, so that every rank sees the losses of whole samples.

n response tokens of a micro-batch, o those about this rank's tokens; T tokens of a whole row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import parallel_state
from trainer.microbatch import PADDING_ID, ContextPart, MicroBatch

__all__ = ["context_part", "own_places", "put_together", "with_even_sequences"]


def own_places(starts: npt.NDArray[np.integer], rank: int, size: int) -> npt.NDArray[np.int64]:
    """Places of the tokens of a rank, in its order, of sequences that follow each other.

    `starts` [S+1]: where each begins, and where the last ends.

    Raises InvalidArgument for a length that is no multiple of 2 · `size`.
    """
    lengths_S = np.diff(starts)
    if (lengths_S % (2 * size)).any():
        raise InvalidArgument(
            explain(
                "dividing sequences over context-parallel ranks",
                expected=f"lengths that are multiples of 2 × {size}",
                found=lengths_S.tolist(),
            )
        )
    chunk_S = lengths_S // (2 * size)
    first_C = np.stack(
        [starts[:-1] + rank * chunk_S, starts[:-1] + (2 * size - 1 - rank) * chunk_S], axis=1
    ).ravel()
    count_C = np.repeat(chunk_S, 2)
    within = np.arange(count_C.sum()) - np.repeat(np.cumsum(count_C) - count_C, count_C)
    places: npt.NDArray[np.int64] = np.repeat(first_C, count_C) + within
    return places


def with_even_sequences(micro: MicroBatch, multiple: int, total: int) -> MicroBatch:
    """A packed micro-batch whose sequences have lengths of multiples of `multiple`, each padded on
    its right, in a row whose length is a multiple of `total`, which is one of `multiple`.

    Padding belongs to the sequence before it, where a causal mask hides it from every token; what
    fills the row is a sequence of its own.
    """
    old_starts = _starts(micro)
    lengths_S = np.diff(old_starts)
    padded_S = -(-lengths_S // multiple) * multiple
    width = int(-(-padded_S.sum() // total) * total)
    starts = np.concatenate([[0], np.cumsum(padded_S)])
    within = np.arange(lengths_S.sum()) - np.repeat(old_starts[:-1], lengths_S)
    places = np.repeat(starts[:-1], lengths_S) + within
    n_old = int(old_starts[-1])
    if starts[-1] < width:
        starts = np.append(starts, width)

    def placed(values: npt.NDArray[Any] | None, padding: Any) -> Any:
        if values is None:
            return None
        out = np.empty((1, width, *values.shape[2:]), values.dtype)
        out[...] = padding
        out[0, places] = values[0, :n_old]
        return out

    experts, weights = micro.expert_ids, micro.expert_weights
    return replace(
        micro,
        tokens_BT=placed(micro.tokens_BT, PADDING_ID),
        positions_BT=placed(micro.positions_BT, 0),
        sequence_starts=starts.astype(np.int32),
        columns_n=places[micro.columns_n],
        # Padding may go to any experts, but to different ones.
        expert_ids=placed(experts, 0 if experts is None else np.arange(experts.shape[-1])),
        expert_weights=placed(weights, 0 if weights is None else 1 / weights.shape[-1]),
        routed_BT=placed(micro.routed_BT, False),
    )


def context_part(micro: MicroBatch, rank: int, size: int) -> MicroBatch:
    """What a context-parallel rank computes of a micro-batch.

    Tokens, experts and what is known of the logits' rows are those of the rank; samples, responses
    and the starts of the sequences of a packed row are still those of the whole.

    Raises InvalidArgument for a sequence or row whose length is no multiple of 2 · `size`.
    """
    rows, width = micro.tokens_BT.shape
    starts = np.arange(rows + 1) * width if micro.sequence_starts is None else _starts(micro)
    places = own_places(starts, rank, size)
    own_BT = places.reshape(rows, -1)
    here = np.full(rows * width, -1, np.int64)
    here[places] = np.arange(len(places))
    columns_n = here[micro.columns_n]
    own_o = np.flatnonzero(columns_n >= 0)

    def taken(values: npt.NDArray[Any] | None) -> Any:
        return None if values is None else values.reshape(rows * width, *values.shape[2:])[own_BT]

    return replace(
        micro,
        tokens_BT=taken(micro.tokens_BT),
        positions_BT=taken(micro.positions_BT),
        columns_n=columns_n[own_o],
        targets_n=micro.targets_n[own_o],
        temperatures_n=micro.temperatures_n[own_o],
        kept_sets=None if micro.kept_sets is None else micro.kept_sets.of(own_o),
        expert_ids=taken(micro.expert_ids),
        expert_weights=taken(micro.expert_weights),
        routed_BT=taken(micro.routed_BT),
        context=ContextPart(own_o=own_o, width=width, here=here),
    )


def put_together(values_o: Tensor, micro: MicroBatch) -> Tensor:
    """[n] on every rank of the context-parallel group, from what each computed for its tokens.

    The identity for a micro-batch that is whole. Every rank gets the same bits (−0.0 becomes 0.0).
    The backward hands a rank the gradient of its own values, and sums nothing: each rank has the
    whole loss.
    """
    if micro.context is None:
        return values_o
    own_o = torch.from_numpy(micro.context.own_o).to(values_o.device)
    whole: Tensor = _PutTogether.apply(  # type: ignore[no-untyped-call]
        values_o, own_o, len(micro.sample_n)
    )
    return whole


class _PutTogether(torch.autograd.Function):
    """Sums of arrays of which one rank alone has set each place."""

    @staticmethod
    def forward(ctx: Any, values_o: Tensor, own_o: Tensor, n: int) -> Tensor:
        """[o] → [n]."""
        ctx.save_for_backward(own_o)
        whole_n = values_o.new_zeros(n)
        whole_n[own_o] = values_o
        dist.all_reduce(whole_n, group=parallel_state.get_context_parallel_group())
        return whole_n

    @staticmethod
    def backward(ctx: Any, gradient_n: Tensor) -> tuple[Tensor | None, ...]:
        """[n] → [o], without a word to other ranks."""
        (own_o,) = ctx.saved_tensors
        return gradient_n[own_o], None, None


def _starts(micro: MicroBatch) -> npt.NDArray[np.int64]:
    if micro.sequence_starts is None:
        raise InvalidArgument(
            explain(
                "dividing a packed row over context-parallel ranks",
                on=f"micro-batch {micro.number}",
                expected="a packed row",
                found="rows of one sample each",
            )
        )
    return micro.sequence_starts.astype(np.int64)
