"""Forward and backward of a step, micro-batch by micro-batch, through Megatron's schedule.

[B, C] stands for rows and the columns from `first_column` on, n for the response tokens of one
micro-batch, N for those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.algorithms.kl import approximate_kl
from trainer.algorithms.losses import LossInputs, policy_loss
from trainer.batch import Batch
from trainer.forward import token_log_probs
from trainer.megatron import get_forward_backward_func
from trainer.microbatch import MicroBatch
from trainer.parallel import device
from trainer.routing_replay import finish_backward, is_moe
from trainer.scoring import first_column, routing_of
from trainer.settings import AlgorithmSettings
from trainer.state import TrainState

__all__ = ["Outcome", "Signals", "forward_backward", "join"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Signals:
    """What is known of each response token before the training forward."""

    advantages_N: npt.NDArray[np.float32]
    weights_N: npt.NDArray[np.float32]
    """The token's weight in the loss of the step; 0 where the mask is 0."""
    old_log_probs_N: npt.NDArray[np.float32] | None
    """What the ratio is taken against; None: the detached current ones."""
    ref_log_probs_N: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcome:
    """What the training forward gave for the response tokens of a micro-batch, or of the step."""

    loss: float
    """The share of the step's loss: the shares of all micro-batches add up to it."""
    log_probs_N: npt.NDArray[np.float32]
    entropy_N: npt.NDArray[np.float32]
    """Of the distribution that each token was drawn from, in nats."""
    policy_loss_N: npt.NDArray[np.float32]
    kl_N: npt.NDArray[np.float32]
    """KL to the reference by `kl_loss_type`; zeros without a reference."""
    clipped_low_N: npt.NDArray[np.bool_]
    clipped_high_N: npt.NDArray[np.bool_]


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of the step from those of its micro-batches, in order."""
    arrays = {
        field.name: np.concatenate([getattr(outcome, field.name) for outcome in outcomes])
        for field in fields(Outcome)
        if field.name != "loss"
    }
    return Outcome(loss=float(sum(outcome.loss for outcome in outcomes)), **arrays)


def forward_backward(
    state: TrainState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    micros: Sequence[MicroBatch],
    signals: Signals,
) -> list[Outcome]:
    """Leave the gradients of the step's loss in `state`; one outcome a micro-batch.

    Loss = Σ_t w_t · (policy_loss_t − entropy_coef · H_t + kl_loss_coef · kl_t).
    """
    column = first_column(batch)
    state.zero_grad()

    def forward_step(
        source: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Outcome]]]:
        micro = next(source)
        log_probs_BC, entropy_BC = token_log_probs(
            model,
            torch.from_numpy(micro.tokens_BT).to(device()),
            temperature=algorithm.rollout_temperature,
            expert_ids=routing_of(micro),
            want_entropy=True,
            entropy_gradient=algorithm.entropy_coef != 0,
            first_column=column,
        )
        loss_of = partial(
            _loss, batch, algorithm, signals, micro, column, len(micros), cast(Tensor, entropy_BC)
        )
        return log_probs_BC, loss_of

    try:
        outcomes: list[Outcome] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=state.chunks,
            num_microbatches=len(micros),
            seq_length=micros[0].tokens_BT.shape[1],
            micro_batch_size=micros[0].tokens_BT.shape[0],
            forward_only=False,
        )
    finally:
        if is_moe(state.model):
            finish_backward(state.model)
    return outcomes


def _loss(
    batch: Batch,
    algorithm: AlgorithmSettings,
    signals: Signals,
    micro: MicroBatch,
    column: int,
    n_micro: int,
    entropy_BC: Tensor,
    log_probs_BC: Tensor,
) -> tuple[Tensor, Outcome]:
    """What Megatron's schedule calls on the output of the forward."""
    sampled_N = batch.sampled_N > 0

    def placed(values_N: npt.NDArray[np.float32]) -> Tensor:
        # NaN where nothing was sampled would go through a product with a zero weight.
        clean_N = np.where(sampled_N, values_N, np.float32(0))
        return torch.from_numpy(micro.place(clean_N)[:, column:]).to(log_probs_BC.device)

    def taken(values_BC: Tensor) -> npt.NDArray[Any]:
        return values_BC.detach().cpu().numpy()[micro.response_BT[:, column:]]

    weights_BC = placed(signals.weights_N)
    in_loss_BC = weights_BC > 0
    current_BC = log_probs_BC.detach()

    def beside_current(values_N: npt.NDArray[np.float32]) -> Tensor:
        # The current log-prob itself where the token is in no loss: a ratio that overflows there
        # would make the gradient 0 · ∞.
        return torch.where(in_loss_BC, placed(values_N), current_BC)

    old_BC = current_BC
    if signals.old_log_probs_N is not None:
        old_BC = beside_current(signals.old_log_probs_N)
    result = policy_loss(
        LossInputs(
            log_probs_BT=log_probs_BC,
            old_log_probs_BT=old_BC,
            rollout_log_probs_BT=beside_current(batch.rollout_log_probs_N),
            advantages_BT=placed(signals.advantages_N),
            mask_BT=in_loss_BC,
        ),
        algorithm,
    )
    token_loss_BC = result.loss_BT
    if algorithm.entropy_coef != 0:
        token_loss_BC = token_loss_BC - algorithm.entropy_coef * entropy_BC
    kl_BC = torch.zeros_like(log_probs_BC)
    if signals.ref_log_probs_N is not None:
        kl_BC = approximate_kl(
            log_probs_BC, beside_current(signals.ref_log_probs_N), algorithm.kl_loss_type
        )
    if algorithm.kl_loss_coef != 0:
        token_loss_BC = token_loss_BC + algorithm.kl_loss_coef * kl_BC
    loss = (weights_BC * token_loss_BC).sum()
    outcome = Outcome(
        loss=float(loss.detach()),
        log_probs_N=taken(log_probs_BC),
        entropy_N=taken(entropy_BC),
        policy_loss_N=taken(result.loss_BT),
        kl_N=taken(kl_BC),
        clipped_low_N=taken(result.clipped_low_BT),
        clipped_high_N=taken(result.clipped_high_BT),
    )
    # The schedule divides by the number of micro-batches; our weights have done all averaging.
    return loss * n_micro, outcome
