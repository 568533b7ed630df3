"""One optimizer step: (state, batch, settings) → (state, the events that say what it was).

Three log-probabilities of each response token are kept apart: by the engine that sampled (rollout),
by the policy that the ratio is taken against (old), and by the policy in training, before the step
(current). B samples, N response tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ledger.canonical import canonical_json, json_digest
from ledger.events import RoutingRecorded, SignalRecorded, StepCommitted, WeightsPublished
from ledger.redact import redact
from ledger.weights import weights_root
from trainer.algorithms.advantages import estimate
from trainer.algorithms.aggregate import token_weights
from trainer.algorithms.corrections import rollout_correction
from trainer.algorithms.kl import approximate_kl
from trainer.algorithms.losses import RESTRAINTS, restrained_tokens
from trainer.algorithms.needs import (
    needs_old_log_probs,
    needs_teacher,
    needs_values,
    reward_parts_used,
)
from trainer.algorithms.rewards import RewardBatch
from trainer.batch import Batch, batch_digest
from trainer.critic_step import (
    CriticOutcome,
    critic_forward_backward,
    critic_metrics,
    score_values,
)
from trainer.frozen import NO_MODELS, StepModels
from trainer.megatron import unwrap
from trainer.micro_step import Signals, forward_backward
from trainer.microbatch import MicroBatch, Partition, cut
from trainer.ranks import data_parallel_rank, data_parallel_size
from trainer.routing_agreement import agreement_metrics, take_counts
from trainer.routing_replay import routes_freely
from trainer.scoring import response_log_probs
from trainer.settings import AlgorithmSettings, BatchSettings, layout_record, settings_record
from trainer.state import TrainState
from trainer.step_check import check_step, require_finite
from trainer.step_events import micro_batch_digests, signal_events, step_metrics, weights_event
from trainer.whole_step import step_inputs

__all__ = ["StepResult", "run_step"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepResult:
    """The events of a step, to be appended in one commit."""

    step_committed: StepCommitted
    signals: list[SignalRecorded]
    """One a sample, in training order."""
    weights: WeightsPublished
    """Transport 'none', acknowledged by nobody: fill in what the publication did."""
    metrics: dict[str, float]
    """As in `step_committed`."""
    routing: list[RoutingRecorded] = field(default_factory=list)
    """What the old policy chose for all samples of the rollout, where this is its first step and
    the settings replay that; on the writer alone."""


def run_step(
    state: TrainState,
    batch: Batch,
    plan: Partition,
    algorithm: AlgorithmSettings,
    sizes: BatchSettings,
    *,
    step: int,
    rollout_step: int,
    step_in_rollout: int,
    weight_version_in: int,
    weight_version_out: int,
    models: StepModels = NO_MODELS,
    old_log_probs_N: npt.NDArray[np.float32] | None = None,
    old_values_N: npt.NDArray[np.float32] | None = None,
    data_time_s: float | None = None,
) -> StepResult:
    """Train `state` by one optimizer step on `batch`. Nothing is stored: that is the caller's part.

    `plan` is the step's partition, and `batch` is in its order (`trainer.stepping.plan_step` makes
    both). Every rank calls it with the same arguments and gets the same result.

    The content of the events is a function of the arguments and the random state: from the same
    restored state it comes out with the same bits, at the same thread count.

    Old log-probs are those of the policy before the rollout's first step. In that step they are the
    detached current ones, bit for bit. In later ones (`step_in_rollout` > 0) hand them in as
    `old_log_probs_N`: by `scoring.score_policy` before the first step, or, in a replay, the
    `log_probs` of the step's recorded signals, one after the other. With `use_rollout_logprobs`
    they are the engine's and nothing is handed in. `needs_old_log_probs` says which settings need
    them handed in for the first step as well.

    `models.reference` is needed with `kl_coef` or `use_kl_loss`, `models.teacher` where
    `needs_teacher` says so; one with experts routes by its own routers. Where `needs_values` says
    so, `state.critic` gives values and is trained beside the policy: by its values before the
    rollout's first step, which are handed in as `old_values_N` for later ones
    (`critic_step.score_values`). In a rollout step below `num_critic_only_steps` the policy stays
    as it is. `data_time_s` is recorded as it is.

    Raises:
        InvalidArgument: settings, batch and model that do not fit together. The state is untouched.
        Diverged: a loss or a gradient that is not finite, named; the weights are untouched. Also
            where the norm of finite gradients overflows: the weights are spoiled then.
    """
    check_step(
        state, batch, algorithm, sizes, step_in_rollout, models, old_log_probs_N, old_values_N
    )
    critic = state.critic if needs_values(algorithm) else None
    began = time.perf_counter()
    if critic is not None and old_values_N is None:
        old_values_N = score_values(critic, batch, plan)
    micros = cut(batch, plan, plan.of_rank(data_parallel_rank()))
    signals = _signals(
        state, batch, algorithm, sizes, micros, models, old_log_probs_N, old_values_N
    )
    outcome = forward_backward(state, batch, algorithm, micros, signals, n_micro=len(plan.ranks_M))
    agreement = take_counts(state.chunks)
    require_finite(state, batch, plan, outcome.losses_M, "the policy")
    learned: CriticOutcome | None = None
    if critic is not None and signals.values_N is not None and signals.returns_N is not None:
        learned = critic_forward_backward(
            critic,
            batch,
            plan,
            old_values_N=signals.values_N,
            returns_N=signals.returns_N,
            weights_N=signals.weights_N,
            value_clip=algorithm.value_clip,
        )
        require_finite(critic, batch, plan, learned.losses_M, "the critic")
    forward_time_s = time.perf_counter() - began

    began = time.perf_counter()
    gradient_digest = weights_root(state.gradient_records())
    critic_gradient_digest = None
    if critic is not None:
        critic_gradient_digest = weights_root(critic.gradient_records())
    digest_time_s = time.perf_counter() - began

    began = time.perf_counter()
    critic_grad_norm = critic_learning_rate = 0.0
    if critic is not None:
        # Inside the policy's step: each leaves the process's generators as it found them.
        _, critic_grad_norm, critic_learning_rate = critic.optimizer_step()
    if critic is not None and rollout_step < algorithm.num_critic_only_steps:
        state.leave_step()
        grad_norm = learning_rate = 0.0
    else:
        _, grad_norm, learning_rate = state.optimizer_step()
    optimizer_time_s = time.perf_counter() - began

    began = time.perf_counter()
    all_settings = {
        **settings_record(
            algorithm, state.settings, sizes, None if critic is None else critic.settings
        ),
        **models.record(),
        **({"megatron": redact(state.parallel.megatron)} if state.parallel.megatron else {}),
    }
    settings, settings_id = canonical_json(all_settings), json_digest(all_settings)
    trainer_N = outcome.log_probs_N if old_log_probs_N is None else old_log_probs_N
    metrics = step_metrics(
        batch,
        signals,
        outcome,
        algorithm,
        trainer_N,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
    ) | agreement_metrics(agreement, unwrap(state.model).config.moe_router_topk)
    if learned is not None and signals.values_N is not None and signals.returns_N is not None:
        metrics |= critic_metrics(
            batch,
            learned,
            old_values_N=signals.values_N,
            returns_N=signals.returns_N,
            grad_norm=critic_grad_norm,
            learning_rate=critic_learning_rate,
        )
    signal_recorded = signal_events(
        batch,
        signals,
        trainer_N,
        correction_weights_N=outcome.correction_weights_N
        if algorithm.use_tis or algorithm.use_opsm
        else None,
        step=step,
        settings_id=settings_id,
    )
    weights = weights_event(
        state.tensor_records(),
        weight_version=weight_version_out,
        parent_version=weight_version_in,
        step=step,
    )
    committed = StepCommitted(
        step=step,
        rollout_step=rollout_step,
        step_in_rollout=step_in_rollout,
        weight_version_in=weight_version_in,
        weight_version_out=weight_version_out,
        indices=batch.indices_B,
        micro_batch_offsets=plan.offsets_M,
        micro_batch_ranks=plan.ranks_M,
        micro_batch_rows=plan.rows,
        micro_batch_width=int(plan.widths_M.max()),
        micro_batch_widths=plan.widths_M if plan.packed else None,
        settings_id=settings_id,
        settings=settings,
        layout=canonical_json(
            {"parallel": layout_record(state.parallel), "data_parallel_size": data_parallel_size()}
        ),
        learning_rate=learning_rate,
        loss=outcome.loss,
        grad_norm=grad_norm,
        metric_names=list(metrics),
        metric_values=np.array(list(metrics.values()), np.float64),
        batch_digest=_digest_of(batch, algorithm, step_in_rollout, old_log_probs_N, old_values_N),
        micro_batch_digests=micro_batch_digests(batch, plan, outcome.log_probs_N),
        gradient_digest=gradient_digest,
        optimizer_digest=state.optimizer_digest(),
        critic_gradient_digest=critic_gradient_digest,
        critic_optimizer_digest=None if critic is None else critic.optimizer_digest(),
        critic_root=None if critic is None else weights_root(critic.tensor_records()),
        random_state_digest=state.random_state_digest(),
        num_threads=torch.get_num_threads(),
        trained_tokens=int(np.count_nonzero(batch.loss_mask_N)),
        data_time_s=data_time_s,
        train_time_s=forward_time_s + optimizer_time_s,
        digest_time_s=digest_time_s + (time.perf_counter() - began),
    )
    return StepResult(
        step_committed=committed, signals=signal_recorded, weights=weights, metrics=metrics
    )


def _signals(
    state: TrainState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    sizes: BatchSettings,
    micros: list[MicroBatch],
    models: StepModels,
    old_log_probs_N: npt.NDArray[np.float32] | None,
    old_values_N: npt.NDArray[np.float32] | None,
) -> Signals:
    """Everything that the training forward is given: advantages, weights, old and reference."""
    old_N = batch.rollout_log_probs_N if algorithm.use_rollout_logprobs else old_log_probs_N
    ref_N = teacher_N = kl_N = policy_N = None
    if models.reference is not None and (algorithm.kl_coef != 0 or algorithm.use_kl_loss):
        ref_N = response_log_probs(models.reference.chunks, batch, micros, free_routing=True)
    if models.teacher is not None and needs_teacher(algorithm):
        teacher_N = response_log_probs(models.teacher.chunks, batch, micros, free_routing=True)
    if algorithm.kl_coef != 0 or needs_teacher(algorithm):
        policy_N = old_N
        if policy_N is None:
            policy_N = response_log_probs(
                state.chunks,
                batch,
                micros,
                free_routing=routes_freely(state.model, algorithm),
            )
    if algorithm.kl_coef != 0 and ref_N is not None and policy_N is not None:
        kl_N = approximate_kl(
            torch.from_numpy(policy_N), torch.from_numpy(ref_N), algorithm.kl_loss_type
        ).numpy()
    rewards = RewardBatch(
        rewards_B=batch.rewards_B,
        group_index_B=batch.group_index_B,
        rollout_id_B=batch.rollout_id_B,
        response_lengths_B=batch.response_lengths_B,
        loss_mask_N=batch.loss_mask_N,
        kl_N=kl_N,
        log_probs_N=policy_N if needs_teacher(algorithm) else None,
        teacher_log_probs_N=teacher_N,
        values_N=old_values_N,
        part_names=batch.part_names,
        reward_parts_BP=batch.reward_parts_BP,
    )
    estimated = estimate(rewards, algorithm)
    advantages_N = estimated.advantages_N
    correction = None
    if needs_old_log_probs(algorithm) and old_N is not None:
        inputs = step_inputs(batch, advantages_N, old_N, old_N)
        correction = rollout_correction(inputs, algorithm)
    restrained_N = None
    if algorithm.policy_loss in RESTRAINTS:
        current_N = response_log_probs(
            state.chunks, batch, micros, free_routing=routes_freely(state.model, algorithm)
        )
        inputs = step_inputs(batch, advantages_N, current_N, current_N if old_N is None else old_N)
        restrained_N = restrained_tokens(inputs, algorithm)
    return Signals(
        advantages_N=advantages_N,
        weights_N=token_weights(
            batch.loss_mask_N,
            batch.response_lengths_B,
            batch.rollout_id_B,
            aggregation=algorithm.aggregation,
            global_batch_size=sizes.global_batch_size,
            loss_scale_factor=algorithm.loss_scale_factor,
        ),
        old_log_probs_N=old_N,
        ref_log_probs_N=ref_N,
        correction=correction,
        restrained_N=restrained_N,
        teacher_log_probs_N=teacher_N,
        values_N=old_values_N,
        returns_N=estimated.returns_N if old_values_N is not None else None,
    )


def _digest_of(
    batch: Batch,
    algorithm: AlgorithmSettings,
    step_in_rollout: int,
    old_log_probs_N: npt.NDArray[np.float32] | None,
    old_values_N: npt.NDArray[np.float32] | None,
) -> bytes:
    """The batch, and what else enters the step: parts of rewards, old log-probs, old values.

    In a rollout's first step the old log-probs are a function of state and batch, given or not,
    unless they are by a kept old actor.
    """
    extra: list[tuple[str, npt.NDArray[np.generic]]] = []
    for name in reward_parts_used(algorithm, batch.part_names):
        column = batch.part_names.index(name)
        extra.append((f"part:{name}", np.asarray(batch.reward_parts_BP)[:, column]))
    input_of_its_own = step_in_rollout > 0 or algorithm.keep_old_actor
    if input_of_its_own and old_log_probs_N is not None:
        old_N = np.where(batch.sampled_N > 0, old_log_probs_N, np.float32(np.nan))
        extra.append(("old_log_probs", old_N))
    if step_in_rollout > 0 and old_values_N is not None:
        extra.append(("old_values", old_values_N))
    return batch_digest(batch, extra)
