"""Which samples of a step go into which micro-batch, on which rank: a function of their lengths,
the settings and the layout, and of nothing else.

B samples, M micro-batches. Lengths are tokens of prompt and response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from trainer.balance import largest_differencing, share_bins
from trainer.microbatch import Partition
from trainer.settings import BatchSettings, ParallelSettings

__all__ = ["PartitionTerms", "partition_for", "terms_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTerms:
    """What a layout asks of a partition."""

    data_parallel_size: int = 1
    """Shares; each has the same number of micro-batches."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of a row."""
    micro_batch_multiple: int = 1
    """The micro-batches of a rank are a multiple of it (interleaved pipeline)."""
    width_multiple: int = 1
    """The tokens of a row are a multiple of it (they are divided among ranks)."""


def terms_of(parallel: ParallelSettings, *, data_parallel_size: int) -> PartitionTerms:
    """The terms of a layout."""
    multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if parallel.context_parallel_size > 1:
        multiple *= 2 * parallel.context_parallel_size  # each rank takes an early and a late part
    interleaved = parallel.num_virtual_stages_per_pipeline_rank is not None
    return PartitionTerms(
        data_parallel_size=data_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        micro_batch_multiple=parallel.pipeline_model_parallel_size if interleaved else 1,
        width_multiple=multiple,
    )


_ONE_RANK = PartitionTerms()


def partition_for(
    lengths_B: npt.NDArray[np.int64],
    indices_B: npt.NDArray[np.int64],
    sizes: BatchSettings,
    terms: PartitionTerms = _ONE_RANK,
) -> Partition:
    """The partition that settings and layout ask for. `indices_B` are for messages alone.

    By default samples stay in order, `micro_batch_size` to a micro-batch; the last one may hold
    fewer; the width is `seq_length`, or the longest sample; ranks get consecutive runs. With
    `balance_data` ranks get as many samples each, of about as many tokens each.

    With `use_dynamic_batch_size`, ranks get about as many tokens each, and a micro-batch is one row
    of samples one after the other, `max_tokens_per_gpu` tokens at most. A sample that is longer
    gets a micro-batch of its own: it is trained like the others, and needs the memory.

    Raises InvalidArgument: a sample that is longer than `seq_length`, named; micro-batches that
    cannot be shared evenly by the ranks.
    """
    _require_fitting(lengths_B, indices_B, sizes.seq_length)
    if sizes.use_dynamic_batch_size:
        return _packed(lengths_B, sizes, terms)
    return _padded(lengths_B, sizes, terms)


def _padded(
    lengths_B: npt.NDArray[np.int64], sizes: BatchSettings, terms: PartitionTerms
) -> Partition:
    n_samples, ranks = len(lengths_B), terms.data_parallel_size
    n_micro = -(-n_samples // sizes.micro_batch_size)
    multiple = ranks * terms.micro_batch_multiple
    if n_micro % multiple:
        raise InvalidArgument(
            explain(
                "sharing micro-batches among the ranks",
                on=f"{n_samples} samples, --micro-batch-size {sizes.micro_batch_size}, "
                f"{ranks} data-parallel ranks"
                + (", interleaved pipeline" if terms.micro_batch_multiple > 1 else ""),
                expected=f"a multiple of {multiple} micro-batches",
                found=n_micro,
                do="change --global-batch-size or --micro-batch-size; where rollouts leave sibling "
                "samples, whose number changes from step to step, use --use-dynamic-batch-size",
            )
        )
    order_B = np.arange(n_samples)
    if sizes.balance_data and ranks > 1:
        if n_samples % (ranks * sizes.micro_batch_size):
            raise InvalidArgument(
                explain(
                    "balancing the samples of the ranks",
                    on=f"--balance-data, {n_samples} samples",
                    expected=f"a multiple of {ranks} ranks × --micro-batch-size "
                    f"{sizes.micro_batch_size}",
                    found=n_samples,
                    do="change --global-batch-size or --micro-batch-size, or use "
                    "--use-dynamic-batch-size",
                )
            )
        order_B = np.concatenate(largest_differencing(lengths_B, ranks, equal_sizes=True))
    width = int(lengths_B.max()) if sizes.seq_length is None else sizes.seq_length
    return Partition(
        order_B=order_B,
        offsets_M=_offsets(sizes.micro_batch_size, n_micro, n_samples),
        ranks_M=(np.arange(n_micro) // (n_micro // ranks)).astype(np.int32),
        rows=sizes.micro_batch_size,
        widths_M=np.full(n_micro, _rounded(width, terms), np.int32),
        packed=False,
    )


def _packed(
    lengths_B: npt.NDArray[np.int64], sizes: BatchSettings, terms: PartitionTerms
) -> Partition:
    shared = share_bins(
        lengths_B,
        (sizes.max_tokens_per_gpu or 0) * terms.context_parallel_size,
        n_ranks=terms.data_parallel_size,
        multiple_of=terms.micro_batch_multiple,
    )
    bins = [one for of_rank in shared for one in of_rank]
    widths = [_rounded(int(lengths_B[one].sum()), terms) for one in bins]
    return Partition(
        order_B=np.concatenate(bins),
        offsets_M=np.cumsum([0, *(len(one) for one in bins)]).astype(np.int32),
        ranks_M=np.repeat(np.arange(len(shared)), len(shared[0])).astype(np.int32),
        rows=1,
        widths_M=np.array(widths, np.int32),
        packed=True,
    )


def _rounded(width: int, terms: PartitionTerms) -> int:
    # A row of one token would predict nothing.
    return -(-max(width, 2) // terms.width_multiple) * terms.width_multiple


def _offsets(size: int, n_micro: int, n_samples: int) -> npt.NDArray[np.int32]:
    return np.minimum(np.arange(n_micro + 1) * size, n_samples).astype(np.int32)


def _require_fitting(
    lengths_B: npt.NDArray[np.int64], indices_B: npt.NDArray[np.int64], seq_length: int | None
) -> None:
    longest = int(lengths_B.max())
    if seq_length is None or longest <= seq_length:
        return
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
