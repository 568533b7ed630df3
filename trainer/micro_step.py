"""Forward and backward of a step, micro-batch by micro-batch, through Megatron's schedule.

M micro-batches; n response tokens of one of them, N those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.algorithms.corrections import Correction, off_policy_correction
from trainer.algorithms.kl import approximate_kl
from trainer.algorithms.losses import LossInputs, policy_loss
from trainer.batch import Batch
from trainer.forward import log_probs_at, micro_output
from trainer.microbatch import MicroBatch
from trainer.parallel import device as current_device
from trainer.ranks import data_parallel_size, is_last_stage, share
from trainer.routing_replay import recomputing, routes_freely
from trainer.schedule import run_schedule
from trainer.settings import AlgorithmSettings
from trainer.state import TrainState

__all__ = ["Outcome", "Signals", "forward_backward"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Signals:
    """What is known of each response token before the training forward."""

    advantages_N: npt.NDArray[np.float32]
    weights_N: npt.NDArray[np.float32]
    """The token's weight in the loss of the step; 0 where the mask is 0."""
    old_log_probs_N: npt.NDArray[np.float32] | None
    """What the ratio is taken against; None: the detached current ones."""
    ref_log_probs_N: npt.NDArray[np.float32] | None
    correction: Correction | None = None
    """[N] Of the whole step, where it is worked out before; None: each micro-batch does."""
    restrained_N: torch.Tensor | None = None
    """bool: the tokens that the policy loss picked out of the whole step, if it does."""
    teacher_log_probs_N: npt.NDArray[np.float32] | None = None
    values_N: npt.NDArray[np.float32] | None = None
    """By the critic before the rollout's first step; None without a critic."""
    returns_N: npt.NDArray[np.float32] | None = None
    """What the critic learns; 0 where the mask is 0."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcome:
    """What the training forward gave for the response tokens of a micro-batch, or of the step."""

    losses_M: npt.NDArray[np.float64]
    """[M] Each micro-batch's share of the step's loss: the shares add up to it. Of a micro-batch:
    its own."""
    log_probs_N: npt.NDArray[np.float32]
    entropy_N: npt.NDArray[np.float32]
    """Of the distribution that each token was drawn from, in nats."""
    policy_loss_N: npt.NDArray[np.float32]
    """Off-policy corrections included."""
    correction_weights_N: npt.NDArray[np.float32]
    """What they multiplied it with: 0 where the token was rejected, 1 where none is on."""
    kl_N: npt.NDArray[np.float32]
    """KL to the reference by `kl_loss_type`; zeros without a reference."""
    clipped_low_N: npt.NDArray[np.bool_] = field(metadata={"dtype": np.bool_})
    clipped_high_N: npt.NDArray[np.bool_] = field(metadata={"dtype": np.bool_})

    @property
    def loss(self) -> float:
        """The loss of the step: the shares of the micro-batches, added up in their order."""
        return float(sum(self.losses_M.tolist()))


def _shared(
    outcomes: Sequence[Outcome], micros: Sequence[MicroBatch], n_micro: int, n_tokens: int
) -> Outcome:
    """The outcome of the step on every rank, from those of each rank's micro-batches."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    responses = [micro.responses for micro in micros]
    for one in fields(Outcome):
        whole: npt.NDArray[Any]
        if one.name == "losses_M":
            whole = np.zeros(n_micro, np.float64)
            places = [slice(micro.number, micro.number + 1) for micro in micros]
        else:
            whole = np.zeros(n_tokens, one.metadata.get("dtype", np.float32))
            places = responses
        if is_last_stage():
            for place, outcome in zip(places, outcomes, strict=True):
                whole[place] = getattr(outcome, one.name)
        arrays[one.name] = share(whole, places)
    return Outcome(**arrays)


def forward_backward(
    state: TrainState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    micros: Sequence[MicroBatch],
    signals: Signals,
    *,
    n_micro: int,
) -> Outcome:
    """Leave the gradients of the step's loss in `state`; returns what came out, on every rank.

    Loss = Σ_t w_t · (c_t · policy_loss_t − entropy_coef · H_t + kl_loss_coef · kl_t), c the weights
    of the off-policy corrections, and nothing of a token that they reject. `micros` are this rank's
    of the `n_micro` micro-batches of the step.
    """
    state.zero_grad()
    # Megatron averages over the micro-batches of a rank and over the data-parallel ranks; our
    # weights have done all averaging.
    scale = len(micros) * data_parallel_size()

    def forward_step(
        source: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Outcome]]]:
        micro = next(source)
        output = micro_output(model, micro, free_routing=routes_freely(model, algorithm))
        return output, partial(_loss, batch, algorithm, signals, micro, scale)

    chunks = state.chunks
    with recomputing(chunks):
        outcomes: list[Outcome] = run_schedule(forward_step, chunks, micros, forward_only=False)
    return _shared(outcomes, micros, n_micro, len(batch.sampled_N))


def _loss(
    batch: Batch,
    algorithm: AlgorithmSettings,
    signals: Signals,
    micro: MicroBatch,
    scale: int,
    logits: Tensor,
) -> tuple[Tensor, Outcome]:
    """What Megatron's schedule calls on the output of the last stage."""
    log_probs_n, entropy = log_probs_at(
        logits,
        micro,
        want_entropy=True,
        entropy_gradient=algorithm.entropy_coef != 0,
    )
    entropy_n = cast(Tensor, entropy)
    sampled_n = batch.sampled_N[micro.responses] > 0

    def placed(values_N: npt.NDArray[Any]) -> Tensor:
        # NaN where nothing was sampled would go through a product with a zero weight.
        clean_n = np.where(sampled_n, values_N[micro.responses], np.float32(0))
        return torch.from_numpy(clean_n).to(log_probs_n.device)

    weights_n = placed(signals.weights_N)
    in_loss_n = weights_n > 0
    current_n = log_probs_n.detach()

    def beside_current(values_N: npt.NDArray[np.float32]) -> Tensor:
        # The current log-prob itself where the token is in no loss: a ratio that overflows there
        # would make the gradient 0 · ∞.
        return torch.where(in_loss_n, placed(values_N), current_n)

    old_n = current_n
    if signals.old_log_probs_N is not None:
        old_n = beside_current(signals.old_log_probs_N)
    inputs = LossInputs(
        log_probs_N=log_probs_n,
        old_log_probs_N=old_n,
        rollout_log_probs_N=beside_current(batch.rollout_log_probs_N),
        advantages_N=placed(signals.advantages_N),
        mask_N=in_loss_n,
        sequence_N=torch.from_numpy(micro.sample_n).to(log_probs_n.device),
        n_sequences=micro.samples.stop - micro.samples.start,
        restrained_N=None
        if signals.restrained_N is None
        else signals.restrained_N[micro.responses].to(log_probs_n.device),
    )
    result = policy_loss(inputs, algorithm)
    policy_loss_n = token_loss_n = result.loss_N
    correction_weights_n = torch.ones_like(current_n)
    known = None if signals.correction is None else _part(signals.correction, micro)
    correction = off_policy_correction(inputs, algorithm, known=known)
    if correction is not None:
        weights_n = torch.where(correction.keep_N, weights_n, 0.0)
        correction_weights_n = torch.where(correction.keep_N, correction.weights_N, 0.0)
        policy_loss_n = token_loss_n = token_loss_n * correction_weights_n
    if algorithm.entropy_coef != 0:
        token_loss_n = token_loss_n - algorithm.entropy_coef * entropy_n
    kl_n = torch.zeros_like(current_n)
    if signals.ref_log_probs_N is not None:
        kl_n = approximate_kl(
            log_probs_n,
            beside_current(signals.ref_log_probs_N),
            algorithm.kl_loss_type,
            old_log_probs=old_n if algorithm.use_unbiased_kl else None,
        )
    if algorithm.kl_loss_coef != 0:
        token_loss_n = token_loss_n + algorithm.kl_loss_coef * kl_n
    loss = (weights_n * token_loss_n).sum()

    def taken(values_n: Tensor) -> npt.NDArray[Any]:
        return values_n.detach().cpu().numpy()

    outcome = Outcome(
        losses_M=np.array([float(loss.detach())]),
        log_probs_N=taken(log_probs_n),
        entropy_N=taken(entropy_n),
        policy_loss_N=taken(policy_loss_n),
        correction_weights_N=taken(correction_weights_n),
        kl_N=taken(kl_n),
        clipped_low_N=taken(result.clipped_low_N),
        clipped_high_N=taken(result.clipped_high_N),
    )
    return loss * scale, outcome


def _part(correction: Correction, micro: MicroBatch) -> Correction:
    """The correction of a micro-batch's tokens, from that of the step."""
    at = current_device()
    return Correction(
        weights_N=correction.weights_N[micro.responses].to(at),
        keep_N=correction.keep_N[micro.responses].to(at),
    )
