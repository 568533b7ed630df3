"""Cuts the batch of a step into micro-batches, by a partition: a recorded decision.

By default every sample is a row, and all micro-batches have one shape [rows, width], padded on the
right, because bits may depend on the shape. Packed micro-batches have one row each, in which the
samples follow each other.

M micro-batches, B samples, N response tokens of the step, n of a micro-batch; T = width, the tokens
of a row, padding included. L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger.events import StepCommitted
from trainer.batch import Batch
from trainer.kept_sets import KeptSets

__all__ = ["ContextPart", "MicroBatch", "Partition", "cut", "recorded_partition"]

PADDING_ID = 0
"""Any id will do: padding on the right reaches no column of a real token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Partition:
    """Which samples go together, in which order, and where, as `step_committed` records it."""

    order_B: npt.NDArray[np.int64]
    """[B] Place p of the training order is taken by sample order_B[p] of those asked for."""
    offsets_M: npt.NDArray[np.int32]
    """[M+1] Micro-batch m is places offsets[m]..offsets[m+1] of the training order."""
    ranks_M: npt.NDArray[np.int32]
    """[M] Data-parallel rank of each micro-batch."""
    rows: int
    """Rows of a micro-batch; 1 where samples are packed."""
    widths_M: npt.NDArray[np.int32]
    """[M] Tokens of a row, padding included: all alike where samples are not packed."""
    packed: bool
    """Whether the samples of a micro-batch follow each other in its one row."""

    def of_rank(self, rank: int) -> list[int]:
        """The micro-batches of a data-parallel rank, in order."""
        return np.flatnonzero(self.ranks_M == rank).tolist()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContextPart:
    """Where the tokens of a context-parallel rank come from (`trainer.context_parallel`)."""

    own_o: npt.NDArray[np.int64]
    """[o] Which of the micro-batch's n response tokens are about this rank's tokens, ascending."""
    width: int
    """Tokens of a whole row."""
    here: npt.NDArray[np.int64]
    """[rows · width] Place of each token of the whole rows in those of this rank; −1: elsewhere."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One micro-batch. What is not a sample's token is padding: in no column that is read."""

    number: int
    """m, its number in the step."""
    samples: slice
    """Its samples in the batch, which is in training order."""
    responses: slice
    """Their response tokens in every array [N] of the batch."""
    tokens_BT: npt.NDArray[np.int64]
    positions_BT: npt.NDArray[np.int64]
    """Position of each token within its sample."""
    sequence_starts: npt.NDArray[np.int32] | None
    """[S+1] Where the samples of a packed row begin, then where the last ends; the padding after
    it is no sample. None where every row is a sample."""
    columns_n: npt.NDArray[np.int64]
    """[n] Which logits are about each response token: row · T + column."""
    targets_n: npt.NDArray[np.int64]
    """[n] The response tokens."""
    sample_n: npt.NDArray[np.int64]
    """[n] Number of each token's sample within the micro-batch, from 0, ascending."""
    temperatures_n: npt.NDArray[np.float64]
    """[n] What logits are divided by before each token's log-probability is taken: as recorded."""
    kept_sets: KeptSets | None
    """[n] The ids that top-p and top-k left at each token; None where no sample has such sets."""
    expert_ids: npt.NDArray[np.integer] | None
    """[rows, T, L, K] Recorded experts. The last token of a sample, whose experts nobody recorded
    because no prediction comes from it, has those of the token before; padding has 0, 1, …, K-1."""
    expert_weights: npt.NDArray[np.float32] | None = None
    """[rows, T, L, K] Recorded gate weights, on the same terms; 1/K in padding."""
    routed_BT: npt.NDArray[np.bool_] | None = None
    """[rows, T] Tokens whose experts were recorded; None without `expert_ids`."""
    context: ContextPart | None = None
    """None: all tokens are here. Otherwise tokens, positions, columns, targets, temperatures, kept
    sets and experts are those of this context-parallel rank, and the rest is of the whole."""


def recorded_partition(step: StepCommitted) -> Partition:
    """The partition of a recorded step, over its samples in training order."""
    widths_M = step.micro_batch_widths
    n_micro = len(step.micro_batch_ranks)
    return Partition(
        order_B=np.arange(len(step.indices)),
        offsets_M=step.micro_batch_offsets,
        ranks_M=step.micro_batch_ranks,
        rows=step.micro_batch_rows,
        widths_M=np.full(n_micro, step.micro_batch_width, np.int32)
        if widths_M is None
        else widths_M,
        packed=widths_M is not None,
    )


def cut(batch: Batch, plan: Partition, micro_batches: Sequence[int]) -> list[MicroBatch]:
    """The micro-batches numbered `micro_batches`, as arrays to be fed to the model.

    `batch` is in training order.
    """
    return [_cut_one(batch, plan, m) for m in micro_batches]


def _cut_one(batch: Batch, plan: Partition, m: int) -> MicroBatch:
    first, last = int(plan.offsets_M[m]), int(plan.offsets_M[m + 1])
    rows, width = plan.rows, int(plan.widths_M[m])
    offsets_T, offsets_N = batch.offsets_T, batch.offsets_N
    lengths_S = np.diff(offsets_T[first : last + 1])
    responses_S = batch.response_lengths_B[first:last]
    # Where each sample begins in the flattened [rows · T].
    starts_S = np.arange(last - first) * width
    if plan.packed:
        starts_S = np.cumsum(lengths_S) - lengths_S
    within_T = np.arange(lengths_S.sum()) - np.repeat(np.cumsum(lengths_S) - lengths_S, lengths_S)
    places_T = np.repeat(starts_S, lengths_S) + within_T
    tokens_BT = np.full(rows * width, PADDING_ID, np.int64)
    tokens_BT[places_T] = batch.tokens_T[offsets_T[first] : offsets_T[last]]
    if plan.packed:
        positions_BT = np.zeros(rows * width, np.int64)
        positions_BT[places_T] = within_T
    else:
        positions_BT = np.tile(np.arange(width), rows)
    within_n = np.arange(responses_S.sum()) - np.repeat(
        np.cumsum(responses_S) - responses_S, responses_S
    )
    # The token before the first of the response predicts it.
    columns_n = np.repeat(starts_S + lengths_S - responses_S - 1, responses_S) + within_n
    return MicroBatch(
        number=m,
        samples=slice(first, last),
        responses=slice(int(offsets_N[first]), int(offsets_N[last])),
        tokens_BT=tokens_BT.reshape(rows, width),
        positions_BT=positions_BT.reshape(rows, width),
        sequence_starts=np.append(starts_S, lengths_S.sum()).astype(np.int32)
        if plan.packed
        else None,
        columns_n=columns_n,
        targets_n=tokens_BT[columns_n + 1],
        sample_n=np.repeat(np.arange(last - first), responses_S),
        temperatures_n=np.repeat(batch.logprob_temperatures_B[first:last], responses_S),
        kept_sets=None
        if batch.kept_sets is None
        else batch.kept_sets.of(np.arange(offsets_N[first], offsets_N[last])),
        context=None,
        **_place_routing(batch, first, last, starts_S, rows, width),
    )


def _place_routing(
    batch: Batch, first: int, last: int, starts_S: npt.NDArray[np.int64], rows: int, width: int
) -> dict[str, npt.NDArray[Any] | None]:
    """The fields of a micro-batch that are about experts."""
    if batch.expert_ids is None:
        return {"expert_ids": None}
    own, starts = batch.expert_ids[first:last], starts_S.tolist()
    topk = batch.expert_ids[0].shape[2]
    routed = np.zeros(rows * width, np.bool_)
    for start, ids in zip(starts, own, strict=True):
        routed[start : start + len(ids)] = True
    weights = None
    if batch.expert_weights is not None:
        even = np.full(topk, 1 / topk, np.float32)
        gates = batch.expert_weights
        weights = _placed(gates[first:last], starts, rows, width, like=gates[0], padding=even)
    return {
        # Padding may go to any experts, but to different ones.
        "expert_ids": _placed(
            own, starts, rows, width, like=batch.expert_ids[0], padding=np.arange(topk)
        ),
        "expert_weights": weights,
        "routed_BT": routed.reshape(rows, width),
    }


def _placed(
    samples: Sequence[npt.NDArray[Any]],
    starts: Sequence[int],
    rows: int,
    width: int,
    *,
    like: npt.NDArray[Any],
    padding: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """[rows, T, L, K] from [tokens − 1, L, K] of each sample, which begins at its start."""
    layers, topk = like.shape[1:]
    out = np.empty((rows * width, layers, topk), like.dtype)
    out[...] = padding
    for start, values in zip(starts, samples, strict=True):
        if len(values):
            out[start : start + len(values)] = values
            out[start + len(values)] = values[-1]
    return out.reshape(rows, width, layers, topk)
