"""Cuts the batch of a step into micro-batches of one shape [rows, width], padded on the right.

The shape is the same for all of them, because bits may depend on it. Which samples a micro-batch
holds, and on which data-parallel rank it runs, is a recorded decision (`step_committed`).

M micro-batches, B samples, N response tokens, T = width, the tokens of a row. Column t of the
predictions [rows, T-1] is about token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.batch import Batch

__all__ = ["MicroBatch", "Partition", "cut", "partition"]

PADDING_ID = 0
"""Any id will do: padding on the right reaches no column of a real token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Partition:
    """Which samples go together, as `step_committed` records it."""

    offsets_M: npt.NDArray[np.int32]
    """[M+1] Micro-batch m is samples offsets[m]..offsets[m+1] of the batch."""
    ranks_M: npt.NDArray[np.int32]
    """[M] Data-parallel rank of each micro-batch."""
    rows: int
    width: int

    def of_rank(self, rank: int) -> list[int]:
        """The micro-batches of a data-parallel rank, in order."""
        return np.flatnonzero(self.ranks_M == rank).tolist()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One micro-batch. Rows beyond its samples are empty: padding only, all masks False."""

    samples: slice
    """Its samples in the batch."""
    responses: slice
    """Their response tokens in every array [N] of the batch."""
    tokens_BT: npt.NDArray[np.int64]
    response_BT: npt.NDArray[np.bool_]
    """[rows, T-1] True in the columns that predict response tokens: their True places, row by row,
    are the tokens of `responses`, in order."""
    expert_ids: npt.NDArray[np.integer] | None
    """[rows, T-1, MoE layers, K]; 0, 1, …, K-1 in padding."""

    def place(
        self, values_N: npt.NDArray[np.generic], *, fill: float = 0.0
    ) -> npt.NDArray[np.generic]:
        """[rows, T-1] The values of this micro-batch's response tokens in their columns."""
        out_BT = np.full(self.response_BT.shape, fill, values_N.dtype)
        out_BT[self.response_BT] = values_N[self.responses]
        return out_BT


def partition(
    lengths_B: npt.NDArray[np.int64],
    indices_B: npt.NDArray[np.int64],
    *,
    micro_batch_size: int,
    seq_length: int | None,
    data_parallel_size: int = 1,
) -> Partition:
    """Samples in order, `micro_batch_size` to a micro-batch; the last one may hold fewer.

    `lengths_B` are tokens of prompt and response. The width is `seq_length`, or the longest sample.
    Ranks get consecutive runs of micro-batches.

    Raises InvalidArgument: a sample that is longer than `seq_length`, named; micro-batches that
    cannot be shared evenly by the ranks.
    """
    longest = int(lengths_B.max())
    if seq_length is not None and longest > seq_length:
        too_long = lengths_B > seq_length
        named = [
            f"sample {index} ({length} tokens)"
            for index, length in zip(
                indices_B[too_long].tolist(), lengths_B[too_long].tolist(), strict=True
            )
        ]
        raise InvalidArgument(
            explain(
                "cutting the batch into micro-batches",
                on=", ".join(named[:8]) + (", …" if len(named) > 8 else ""),
                expected=f"at most --seq-length {seq_length} tokens of prompt and response",
                found=f"{len(named)} of {len(lengths_B)} samples are longer, up to {longest}",
                do=f"raise --seq-length to {longest} or more, or generate less",
            )
        )
    n_samples = len(lengths_B)
    n_micro = -(-n_samples // micro_batch_size)
    if n_micro % data_parallel_size:
        raise InvalidArgument(
            explain(
                "sharing micro-batches among the data-parallel ranks",
                on=f"{n_samples} samples, --micro-batch-size {micro_batch_size}",
                expected=f"a multiple of {data_parallel_size} micro-batches",
                found=n_micro,
                do="change --global-batch-size or --micro-batch-size",
            )
        )
    offsets_M = np.minimum(np.arange(n_micro + 1) * micro_batch_size, n_samples)
    return Partition(
        offsets_M=offsets_M.astype(np.int32),
        ranks_M=(np.arange(n_micro) // (n_micro // data_parallel_size)).astype(np.int32),
        rows=micro_batch_size,
        width=longest if seq_length is None else seq_length,
    )


def cut(batch: Batch, plan: Partition, micro_batches: Sequence[int]) -> list[MicroBatch]:
    """The micro-batches numbered `micro_batches`, as arrays to be fed to the model."""
    return [_cut_one(batch, plan, m) for m in micro_batches]


def _cut_one(batch: Batch, plan: Partition, m: int) -> MicroBatch:
    first, last = int(plan.offsets_M[m]), int(plan.offsets_M[m + 1])
    offsets_T, offsets_N = batch.offsets_T, batch.offsets_N
    lengths_B = np.zeros(plan.rows, np.int64)
    lengths_B[: last - first] = np.diff(offsets_T[first : last + 1])
    prompts_B = np.zeros(plan.rows, np.int64)
    prompts_B[: last - first] = batch.prompt_lengths_B[first:last]
    columns_T = np.arange(plan.width)
    tokens_BT = np.full((plan.rows, plan.width), PADDING_ID, np.int64)
    tokens_BT[columns_T < lengths_B[:, None]] = batch.tokens_T[offsets_T[first] : offsets_T[last]]
    about_T = columns_T[1:]  # the token that each column predicts
    response_BT = (about_T >= prompts_B[:, None]) & (about_T < lengths_B[:, None])
    return MicroBatch(
        samples=slice(first, last),
        responses=slice(int(offsets_N[first]), int(offsets_N[last])),
        tokens_BT=tokens_BT,
        response_BT=response_BT,
        expert_ids=_pad_routing(batch, plan, first, last),
    )


def _pad_routing(
    batch: Batch, plan: Partition, first: int, last: int
) -> npt.NDArray[np.integer] | None:
    if batch.expert_ids is None:
        return None
    layers, topk = batch.expert_ids[first].shape[1:]
    out = np.empty((plan.rows, plan.width - 1, layers, topk), batch.expert_ids[first].dtype)
    out[...] = np.arange(topk)  # padding: any experts, but different ones
    for row, ids in enumerate(batch.expert_ids[first:last]):
        out[row, : len(ids)] = ids
    return out
