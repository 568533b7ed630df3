"""The critic's part of a step: values before it, and forward and backward of the value loss.

M micro-batches; n response tokens of one of them, N those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.algorithms.metrics import mean_where
from trainer.batch import Batch
from trainer.context_parallel import put_together
from trainer.critic import value_loss
from trainer.forward import micro_output
from trainer.microbatch import MicroBatch, Partition, cut
from trainer.ranks import data_parallel_rank, data_parallel_size, is_last_stage, share
from trainer.schedule import run_schedule
from trainer.state import TrainState

__all__ = ["CriticOutcome", "critic_forward_backward", "critic_metrics", "score_values"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CriticOutcome:
    """What the critic's training forward gave."""

    losses_M: npt.NDArray[np.float64]
    """[M] Each micro-batch's share of the value loss of the step."""
    values_N: npt.NDArray[np.float32]
    loss_N: npt.NDArray[np.float32]
    clipped_N: npt.NDArray[np.bool_]
    """Where the value moved further than the value clip allows."""

    @property
    def loss(self) -> float:
        """The value loss of the step: shares added up in the order of the micro-batches."""
        return float(sum(self.losses_M.tolist()))


def score_values(critic: TrainState, batch: Batch, plan: Partition) -> npt.NDArray[np.float32]:
    """The critic's value [N] of the state before each response token, on every rank.

    A critic with experts routes by its own routers.
    """
    micros = cut(batch, plan, plan.of_rank(data_parallel_rank()))

    def score(values_BT1: Tensor, micro: MicroBatch) -> tuple[Tensor, npt.NDArray[np.float32]]:
        return values_BT1.new_zeros(()), _values_at(values_BT1, micro).cpu().numpy()

    with torch.no_grad():
        scored = _schedule(critic, micros, score, forward_only=True)
    out_N = np.full(len(batch.sampled_N), np.nan, np.float32)
    places = [micro.responses for micro in micros]
    if is_last_stage():
        for place, values_n in zip(places, scored, strict=True):
            out_N[place] = values_n
    return share(out_N, places)


def critic_forward_backward(
    critic: TrainState,
    batch: Batch,
    plan: Partition,
    *,
    old_values_N: npt.NDArray[np.float32],
    returns_N: npt.NDArray[np.float32],
    weights_N: npt.NDArray[np.float32],
    value_clip: float,
) -> CriticOutcome:
    """Leave the gradients of the value loss in `critic`; returns what came out, on every rank.

    Loss = Σ_t w_t · value_loss_t, with the weights of the policy's loss.
    """
    micros = cut(batch, plan, plan.of_rank(data_parallel_rank()))
    critic.zero_grad()
    # As in the policy's forward: Megatron's averages are undone, our weights have averaged.
    scale = len(micros) * data_parallel_size()

    def loss_of(values_BT1: Tensor, micro: MicroBatch) -> tuple[Tensor, tuple[Any, ...]]:
        values_n = _values_at(values_BT1, micro)

        def placed(array_N: npt.NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(array_N[micro.responses]).to(values_n.device)

        weights_n = placed(weights_N)
        loss_n, clipped_n = value_loss(
            values_n, placed(old_values_N), placed(returns_N), value_clip
        )
        loss = (weights_n * loss_n).sum()
        arrays = tuple(one.detach().cpu().numpy() for one in (values_n, loss_n, clipped_n))
        return loss * scale, (float(loss.detach()), *arrays)

    outcomes = _schedule(critic, micros, loss_of, forward_only=False)
    losses_M = np.zeros(len(plan.ranks_M), np.float64)
    n_tokens = len(batch.sampled_N)
    whole = [np.zeros(n_tokens, dtype) for dtype in (np.float32, np.float32, np.bool_)]
    if is_last_stage():
        for micro, (loss, *arrays) in zip(micros, outcomes, strict=True):
            losses_M[micro.number] = loss
            for out, array in zip(whole, arrays, strict=True):
                out[micro.responses] = array
    places = [micro.responses for micro in micros]
    values_N, loss_N, clipped_N = (share(out, places) for out in whole)
    return CriticOutcome(
        losses_M=share(losses_M, [slice(m.number, m.number + 1) for m in micros]),
        values_N=values_N,
        loss_N=loss_N,
        clipped_N=clipped_N,
    )


def critic_metrics(
    batch: Batch,
    outcome: CriticOutcome,
    *,
    old_values_N: npt.NDArray[np.float32],
    returns_N: npt.NDArray[np.float32],
    grad_norm: float,
    learning_rate: float,
) -> dict[str, float]:
    """Metrics of the critic by name; means are over tokens with loss mask 1.

    `value_explained_variance` is 1 − var(returns − values) / var(returns), NaN where the returns
    do not vary.
    """
    mask_N = batch.loss_mask_N
    taken = mask_N > 0
    returns = returns_N[taken].astype(np.float64)
    errors = returns - old_values_N[taken].astype(np.float64)
    varies = len(returns) > 0 and returns.var() > 0
    return {
        "value_loss": outcome.loss,
        "value_clip_fraction": mean_where(outcome.clipped_N, mask_N),
        "value_mean": mean_where(old_values_N, mask_N),
        "return_mean": mean_where(returns_N, mask_N),
        "value_explained_variance": float(1 - errors.var() / returns.var())
        if varies
        else float("nan"),
        "critic_grad_norm": grad_norm,
        "critic_learning_rate": learning_rate,
    }


def _values_at(values_BT1: Tensor, micro: MicroBatch) -> Tensor:
    """[n] float32: the value where each response token is predicted."""
    if micro.sequence_starts is not None:
        values_n = values_BT1  # the head of packed rows sees the response tokens alone
    else:
        columns_n = torch.from_numpy(micro.columns_n).to(values_BT1.device)
        values_n = values_BT1.flatten(0, 1).index_select(0, columns_n)
    return put_together(values_n[:, 0].float(), micro)


def _schedule(
    critic: TrainState,
    micros: Sequence[MicroBatch],
    finish: Callable[[Tensor, MicroBatch], tuple[Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    """What `finish` gave for each micro-batch, on the last stage."""

    def forward_step(
        source: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]:
        micro = next(source)
        return micro_output(model, micro, free_routing=True), lambda values: finish(values, micro)

    return run_schedule(forward_step, critic.chunks, micros, forward_only=forward_only)
