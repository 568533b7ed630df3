"""Whether settings, batch, model and reference of a step fit together."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ledger.errors import Diverged, InvalidArgument, explain
from trainer.algorithms.needs import needs_old_log_probs, needs_teacher, needs_values
from trainer.batch import Batch
from trainer.frozen import StepModels
from trainer.megatron import unwrap
from trainer.microbatch import Partition
from trainer.ranks import all_gather_object
from trainer.routing_replay import count_moe_layers, is_moe, require_replayable
from trainer.settings import AlgorithmSettings, BatchSettings
from trainer.state import TrainState

__all__ = ["check_policy", "check_step", "require_finite"]


def check_step(
    state: TrainState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    sizes: BatchSettings,
    step_in_rollout: int,
    models: StepModels,
    old_log_probs_N: npt.NDArray[np.float32] | None,
    old_values_N: npt.NDArray[np.float32] | None,
) -> None:
    """Raises InvalidArgument with what does not fit; arguments as in `run_step`."""
    rollouts = len(np.unique(batch.rollout_id_B))
    if rollouts != sizes.global_batch_size:
        raise _wrong(
            "--global-batch-size",
            f"{sizes.global_batch_size} rollouts in the batch of a step (sibling samples of one "
            "rollout count once)",
            f"{rollouts} rollouts, {len(batch.indices_B)} samples",
            "give the step as many rollouts as its settings say: they divide its loss",
        )
    _check_routing(state, batch, algorithm)
    lacks_set_N = np.repeat(batch.logprob_processed_B, batch.response_lengths_B)
    lacks_set_N &= batch.sampled_N > 0
    if batch.kept_lengths_N is not None:
        lacks_set_N &= batch.kept_lengths_N == 0
    if lacks_set_N.any():
        sample = int(np.searchsorted(batch.offsets_N, np.argmax(lacks_set_N), "right")) - 1
        raise _wrong(
            f"sample {batch.indices_B[sample]}, whose log-probs are of what top-p and top-k left",
            "the ids that they left (rollout_top_p_token_ids)",
            "none",
            "record them, or sample with log-probs of the whole vocabulary "
            "(--rollout-logprob-mode full): the two are not of one distribution",
        )
    needs_reference = algorithm.kl_coef != 0 or algorithm.use_kl_loss
    if needs_reference and models.reference is None:
        raise _wrong(
            "--kl-coef" if algorithm.kl_coef != 0 else "--use-kl-loss",
            "a reference model",
            "none",
            "pass the run's first version as reference, or switch the KL off",
        )
    if needs_teacher(algorithm) and models.teacher is None:
        raise _wrong(
            "--use-opd or --advantage-estimator on_policy_distillation",
            "a teacher",
            "none",
            "give the folder of a model with the policy's vocabulary: --opd-teacher-load",
        )
    _check_critic(state, batch, algorithm, step_in_rollout, old_values_N)
    _check_old(batch, algorithm, step_in_rollout, old_log_probs_N)


def check_policy(state: TrainState, algorithm: AlgorithmSettings) -> None:
    """Whether the settings ask of the policy what it has, before a step and before a run begins.

    Raises InvalidArgument for routing replay without experts.
    """
    by_policy = algorithm.routing_replay == "old_policy"
    if not is_moe(state.model) and (by_policy or algorithm.replay_routing_weights):
        raise _wrong(
            "a dense model",
            "no routing replay: there are no experts",
            "--use-routing-replay" if by_policy else "--replay-routing-weights",
            "leave the option out",
        )


def _check_routing(state: TrainState, batch: Batch, algorithm: AlgorithmSettings) -> None:
    mode = algorithm.routing_replay
    if not is_moe(state.model):
        if batch.expert_ids is not None:
            raise _wrong(
                "a dense model",
                "samples without routing",
                "samples of a model with experts",
                "train the model that sampled them",
            )
        check_policy(state, algorithm)
        return
    if mode == "free":
        if batch.expert_ids is not None:
            raise _wrong("free routing", "a batch without experts", "recorded experts")
        return
    require_replayable(state.model)
    if batch.expert_ids is None:
        raise _wrong(
            "a model with experts",
            "the recorded routing of every sample",
            "none",
            "record the routing while sampling (routing_recorded events), or ask for the old "
            "policy's by --use-routing-replay, or for free routing by "
            "--no-use-rollout-routing-replay: it is never free in silence",
        )
    config = unwrap(state.model).config
    layers, topk = batch.expert_ids[0].shape[1:]
    found = (layers, topk, batch.num_experts or config.num_moe_experts)
    expected = (count_moe_layers(state.model), config.moe_router_topk, config.num_moe_experts)
    if found != expected:
        raise _wrong(
            "the recorded routing",
            "{} MoE layers, top {} of {} experts, as the model has".format(*expected),
            "{} layers, top {} of {} experts".format(*found),
            "train the model that sampled them; a layer too few is one that the engine's pipeline "
            "stages did not capture",
        )
    if not algorithm.replay_routing_weights:
        return
    if batch.expert_weights is None:
        raise _wrong(
            "--replay-routing-weights",
            "recorded gate weights of every sample",
            "expert ids alone",
            "sample with --record-routing-weights",
        )
    if state.settings.weight_decay:
        raise _wrong(
            "--replay-routing-weights",
            "--weight-decay 0: no gradient reaches the routers, and decay alone would flatten them",
            f"--weight-decay {state.settings.weight_decay}",
        )


def require_finite(
    state: TrainState,
    batch: Batch,
    plan: Partition,
    losses_M: npt.NDArray[np.float64],
    whose: str,
) -> None:
    """Before the optimizer: afterwards the weights would be spoiled. Every rank raises alike.

    `losses_M` is each micro-batch's share of the loss; the gradients are those in `state`. Raises
    Diverged, naming the first micro-batch or parameter that is not finite.
    """
    for number in np.flatnonzero(~np.isfinite(losses_M)).tolist():
        samples = batch.indices_B[plan.offsets_M[number] : plan.offsets_M[number + 1]]
        raise Diverged(
            explain(
                f"computing the loss of {whose} in a step",
                on=f"micro-batch {number}, samples {samples.tolist()}",
                expected="a finite number",
                found=losses_M[number],
                do="nothing was committed and the weights are unchanged; look at the rollout "
                "log-probs and rewards of these samples, and at --lr",
            )
        )
    named = (
        name
        for chunk in state.chunks
        for name, parameter in unwrap(chunk).named_parameters()
        # The largest of all: NaN and infinity come through, in one pass.
        if not math.isfinite(float(torch.linalg.vector_norm(parameter.main_grad, ord=math.inf)))
    )
    for rank, name in enumerate(all_gather_object(next(named, None))):
        if name is not None:
            raise Diverged(
                explain(
                    f"computing the gradients of {whose} in a step",
                    on=f"parameter {name!r}, rank {rank}",
                    expected="finite numbers",
                    found="infinity or NaN",
                    do="nothing was committed and the weights are unchanged; lower --lr, or look "
                    "for extreme log-prob ratios",
                )
            )


def _check_critic(
    state: TrainState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    step_in_rollout: int,
    old_values_N: npt.NDArray[np.float32] | None,
) -> None:
    if not needs_values(algorithm):
        if old_values_N is not None:
            raise _wrong("old values", "none: the estimator asks no critic", "values")
        return
    if state.critic is None:
        raise _wrong(
            f"--advantage-estimator {algorithm.advantage_estimator}",
            "a critic beside the policy",
            "none",
            "make one by trainer.critic.create_critic",
        )
    if (old_values_N is not None) != (step_in_rollout > 0):
        raise _wrong(
            f"step {step_in_rollout} of its rollout",
            "the values of the critic before the rollout's first step, from the second step on",
            "none" if old_values_N is None else "values in the first step",
            "compute them by trainer.critic_step.score_values before the first step",
        )
    if old_values_N is not None and (
        old_values_N.shape != batch.sampled_N.shape or old_values_N.dtype != np.float32
    ):
        raise _wrong(
            "old values",
            f"float32, one for each of {len(batch.sampled_N)} response tokens",
            f"{old_values_N.dtype}, shape {old_values_N.shape}",
        )


def _check_old(
    batch: Batch,
    algorithm: AlgorithmSettings,
    step_in_rollout: int,
    old_log_probs_N: npt.NDArray[np.float32] | None,
) -> None:
    if old_log_probs_N is None:
        if needs_old_log_probs(algorithm):
            raise _wrong(
                "--mis-batch-normalize",
                "the log-probs by the policy before the step: the weights of the whole step are "
                "needed before its first micro-batch",
                "none",
                "compute them by trainer.scoring.score_policy before the step",
            )
        if step_in_rollout > 0 and not algorithm.use_rollout_logprobs:
            raise _wrong(
                f"step {step_in_rollout} of its rollout",
                "the log-probs by the policy before the rollout's first step",
                "none",
                "compute them by trainer.scoring.score_policy before the first step, or set "
                "--use-rollout-logprobs",
            )
        return
    if algorithm.use_rollout_logprobs:
        raise _wrong(
            "--use-rollout-logprobs",
            "the engine's log-probs alone as old ones",
            "old log-probs by the trainer as well",
        )
    if old_log_probs_N.shape != batch.sampled_N.shape or old_log_probs_N.dtype != np.float32:
        raise _wrong(
            "old log-probs",
            f"float32, one for each of {len(batch.sampled_N)} response tokens",
            f"{old_log_probs_N.dtype}, shape {old_log_probs_N.shape}",
        )


def _wrong(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("preparing a training step", on=on, expected=expected, found=found, do=do)
    )
