"""Log-probabilities of recorded responses by a policy, without a gradient.

N response tokens of the batch. What is computed here for the policy in training has the same bits
as in its training forward: same micro-batches, same columns, same routing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batch import Batch
from trainer.forward import log_probs_at, micro_output
from trainer.microbatch import MicroBatch, Partition, cut
from trainer.ranks import data_parallel_rank, is_last_stage, share
from trainer.routing_record import RoutingRecorder
from trainer.routing_replay import recomputing
from trainer.schedule import run_schedule
from trainer.state import TrainState

__all__ = ["response_log_probs", "score_policy"]


def score_policy(
    state: TrainState,
    batch: Batch,
    plan: Partition,
    *,
    free_routing: bool = False,
    chunks: Sequence[Any] | None = None,
) -> npt.NDArray[np.float32]:
    """The policy's log-probs [N] of a batch as it is now; NaN where nothing was sampled.

    With several optimizer steps a rollout, call it for the batch of each before the first of them,
    and hand the results to `run_step` as `old_log_probs_N`. `plan` is the step's partition; `batch`
    is in its order. Experts are those of the batch; with `free_routing` the routers choose.
    `chunks` are those of another model, with the same layout, that sampled.
    """
    micros = cut(batch, plan, plan.of_rank(data_parallel_rank()))
    log_probs_N = response_log_probs(
        chunks or state.chunks, batch, micros, free_routing=free_routing
    )
    return np.where(batch.sampled_N > 0, log_probs_N, np.float32(np.nan))


def response_log_probs(
    chunks: Sequence[Any],
    batch: Batch,
    micros: Sequence[MicroBatch],
    *,
    free_routing: bool = False,
    recorder: RoutingRecorder | None = None,
) -> npt.NDArray[np.float32]:
    """Log-probs [N] of all response tokens by a model, on every rank.

    `chunks` are this rank's stages of the model, `micros` this rank's micro-batches. Experts are
    those recorded, or, with `free_routing`, what the model's own routers choose (for a reference
    model, which has routers of its own); `recorder` then gets to know what they chose.
    """

    def forward_step(
        source: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, npt.NDArray[np.float32]]]]:
        micro = next(source)
        with contextlib.nullcontext() if recorder is None else recorder.watching(model, micro):
            output = micro_output(model, micro, free_routing=free_routing)

        def score(logits: Tensor) -> tuple[Tensor, npt.NDArray[np.float32]]:
            log_probs_n, _ = log_probs_at(logits, micro)
            # The schedule wants a loss; nothing is trained here.
            return logits.new_zeros(()), log_probs_n.cpu().numpy()

        return output, score

    out_N = np.full(len(batch.sampled_N), np.nan, np.float32)
    with torch.no_grad(), recomputing(chunks):
        scored: list[npt.NDArray[np.float32]] = run_schedule(
            forward_step, chunks, micros, forward_only=True
        )
    if is_last_stage():
        for micro, log_probs_n in zip(micros, scored, strict=True):
            out_N[micro.responses] = log_probs_n
    return share(out_N, [micro.responses for micro in micros])
