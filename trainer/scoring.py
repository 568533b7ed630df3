"""Log-probabilities of recorded responses by a policy, without a gradient.

N response tokens of the batch. What is computed here for the policy in training has the same bits
as in its training forward: same micro-batches, same columns, same routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.batch import Batch
from trainer.forward import token_log_probs
from trainer.microbatch import MicroBatch, cut, partition
from trainer.parallel import device
from trainer.routing_replay import finish_backward, is_moe
from trainer.settings import AlgorithmSettings, BatchSettings
from trainer.state import TrainState

__all__ = ["first_column", "response_log_probs", "routing_of", "score_policy"]


def score_policy(
    state: TrainState, batch: Batch, algorithm: AlgorithmSettings, sizes: BatchSettings
) -> npt.NDArray[np.float32]:
    """The policy's log-probs [N] of a batch as it is now; NaN where nothing was sampled.

    With several optimizer steps a rollout, call it for the batch of each before the first of them,
    and hand the results to `run_step` as `old_log_probs_N`.

    Raises InvalidArgument as `run_step` does for the batch.
    """
    plan = partition(
        batch.prompt_lengths_B + batch.response_lengths_B,
        batch.indices_B,
        micro_batch_size=sizes.micro_batch_size,
        seq_length=sizes.seq_length,
    )
    micros = cut(batch, plan, plan.of_rank(0))
    log_probs_N = response_log_probs(
        state.chunks[0], batch, micros, temperature=algorithm.rollout_temperature
    )
    return np.where(batch.sampled_N > 0, log_probs_N, np.float32(np.nan))


def response_log_probs(
    model: Any,
    batch: Batch,
    micros: Sequence[MicroBatch],
    *,
    temperature: float,
    free_routing: bool = False,
) -> npt.NDArray[np.float32]:
    """Log-probs [N] of all response tokens by `model`, micro-batch by micro-batch.

    Experts are those recorded, or, with `free_routing`, what the model's own routers choose (for a
    reference model, which has routers of its own).
    """
    out_N = np.full(len(batch.sampled_N), np.nan, np.float32)
    column = first_column(batch)
    with torch.no_grad():
        for micro in micros:
            log_probs, _ = token_log_probs(
                model,
                torch.from_numpy(micro.tokens_BT).to(device()),
                temperature=temperature,
                expert_ids=None if free_routing else routing_of(micro),
                free_routing=free_routing,
                first_column=column,
            )
            out_N[micro.responses] = log_probs.cpu().numpy()[micro.response_BT[:, column:]]
    if is_moe(model):
        finish_backward(model)
    return out_N


def first_column(batch: Batch) -> int:
    """The first column of the predictions that is about a response token of any sample."""
    return int(batch.prompt_lengths_B.min()) - 1


def routing_of(micro: MicroBatch) -> torch.Tensor | None:
    """The recorded experts of a micro-batch, int64 on the device; None where none are recorded."""
    if micro.expert_ids is None:
        return None
    return torch.from_numpy(micro.expert_ids.astype(np.int64)).to(device())
