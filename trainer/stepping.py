"""Taking the optimizer steps of one rollout step, for the first time or again.

All steps of a rollout use the log-probs of the policy before its first step as old log-probs, so a
rollout is the unit that is trained, restored and replayed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ledger.errors import InvalidArgument, NotFound, explain
from ledger.events import RoutingRecorded, StepCommitted
from ledger.reader import Reader
from ledger.views import TableSource
from trainer.algorithms.needs import needs_old_log_probs, needs_values
from trainer.algorithms.offpolicy_mask import mask_offpolicy
from trainer.batch import Batch, load_batch
from trainer.batch_lengths import read_lengths
from trainer.batch_routing import BY_ENGINE, RoutingSource
from trainer.critic_step import score_values
from trainer.frozen import NO_MODELS, FrozenModel, StepModels
from trainer.microbatch import Partition
from trainer.partition import partition_for, terms_of
from trainer.ranks import data_parallel_size
from trainer.rollout_routing import engine_routing, policy_routing
from trainer.routing_replay import routes_freely
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings, BatchSettings, OptimizerSettings, ParallelSettings
from trainer.state import TrainState
from trainer.step import StepResult, run_step

__all__ = ["PlannedStep", "RecordedSettings", "plan_step", "recorded_settings", "take_rollout"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlannedStep:
    """One optimizer step to be taken."""

    step: int
    rollout_step: int
    step_in_rollout: int
    weight_version_in: int
    weight_version_out: int
    indices: npt.NDArray[np.int64]
    """[B] The samples: in any order, or, with a partition, in training order."""
    partition: Partition | None = None
    """As recorded, where a step is run again; None: it is made from the settings."""
    old_log_probs_N: npt.NDArray[np.float32] | None = None
    """As recorded, in training order, where a step with a kept old actor is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSettings:
    """The settings of a recorded step, as data."""

    algorithm: AlgorithmSettings
    optimizer: OptimizerSettings
    sizes: BatchSettings
    critic: OptimizerSettings | None
    """Of the critic's optimizer; None where the step had no critic."""
    models: Mapping[str, str]
    """Role of a frozen model → root of its weights (hex), where an option named its folder."""


def recorded_settings(step: StepCommitted) -> RecordedSettings:
    """Read the settings of a recorded step.

    Raises InvalidArgument where they have a setting that this version does not know.
    """
    found = json.loads(step.settings)

    def made(kind: Any, values: Mapping[str, Any]) -> Any:
        known = {f.name for f in fields(kind)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidArgument(
                explain(
                    "reading the settings of a recorded step",
                    on=f"step {step.step}",
                    expected=f"settings that this version has: {', '.join(sorted(known))}",
                    found=", ".join(unknown),
                    do="use the version of this package that recorded the step, or a newer one",
                )
            )
        return kind(**values)

    return RecordedSettings(
        algorithm=made(AlgorithmSettings, found["algorithm"]),
        optimizer=made(OptimizerSettings, found["optimizer"]),
        sizes=made(BatchSettings, found["sizes"]),
        critic=made(OptimizerSettings, found["critic"]) if "critic" in found else None,
        models=dict(found.get("models", {})),
    )


def plan_step(
    reader: TableSource,
    indices: npt.NDArray[np.int64],
    sizes: BatchSettings,
    parallel: ParallelSettings,
    *,
    recorded: Partition | None = None,
    routing: RoutingSource | None = BY_ENGINE,
) -> tuple[Batch, Partition]:
    """The batch of a step in training order, and how it is cut up.

    The partition is the recorded one, or made from the lengths of the samples, the settings and the
    layout. `routing` says whose choices of experts are read with it. Raises what `load_batch` and
    `partition` raise.
    """
    if recorded is not None:
        return load_batch(reader, indices, routing=routing), recorded
    terms = terms_of(parallel, data_parallel_size=data_parallel_size())
    if not (sizes.use_dynamic_batch_size or sizes.balance_data):
        # The order is the one asked for: no need to look at the lengths first.
        batch = load_batch(reader, indices, routing=routing)
        lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
        return batch, partition_for(lengths_B, indices, sizes, terms)
    lengths_B = read_lengths(reader, indices)
    made = partition_for(lengths_B, indices, sizes, terms)
    return load_batch(reader, indices[made.order_B], routing=routing), made


def take_rollout(
    state: TrainState,
    reader: Reader,
    planned: Sequence[PlannedStep],
    algorithm: AlgorithmSettings,
    sizes: BatchSettings,
    *,
    models: StepModels = NO_MODELS,
    old_actor: FrozenModel | None = None,
) -> Iterator[tuple[PlannedStep, Batch, StepResult]]:
    """Take the steps of one rollout in order; `state` is that after each step when it is yielded.

    `planned` are consecutive steps of one rollout, from the first that is trained here. Where that
    is not the rollout's own first step, the old log-probs and values are those recorded when the
    samples were first trained on. With `keep_old_actor` old log-probs are by `old_actor`, or, in a
    replay, those that the plan brings. Raises what `load_batch` and `run_step` raise.
    """
    batches: list[tuple[Batch, Partition, float]] = []
    for plan in planned:
        began = time.perf_counter()
        batch, cut_up = plan_step(
            reader,
            plan.indices,
            sizes,
            state.parallel,
            recorded=plan.partition,
            routing=engine_routing(algorithm),
        )
        if algorithm.mask_offpolicy_in_partial_rollout:
            newest_N = mask_offpolicy(batch.weight_versions_N, batch.sampled_N, batch.offsets_N)
            batch = replace(batch, loss_mask_N=newest_N * batch.loss_mask_N)
        batches.append((batch, cut_up, time.perf_counter() - began))
    routing: list[RoutingRecorded] = []
    if algorithm.routing_replay == "old_policy":
        chosen = policy_routing(
            state,
            reader,
            [(batch, cut_up) for batch, cut_up, _ in batches],
            algorithm,
            step_in_rollout=planned[0].step_in_rollout,
            weight_version_in=planned[0].weight_version_in,
            weight_version_out=planned[0].weight_version_out,
        )
        batches = [
            (batch, cut_up, spent)
            for batch, (_, cut_up, spent) in zip(chosen.batches, batches, strict=True)
        ]
        routing = chosen.events
    if planned[0].step_in_rollout == 0 and algorithm.reset_optimizer_states:
        state.reset_optimizer()
    old = _old_log_probs(state, reader, planned, batches, algorithm, old_actor)
    old_values = _old_values(state, reader, planned, batches, algorithm)
    for plan, (batch, cut_up, data_time_s), old_log_probs_N, old_values_N in zip(
        planned, batches, old, old_values, strict=True
    ):
        result = run_step(
            state,
            batch,
            cut_up,
            algorithm,
            sizes,
            step=plan.step,
            rollout_step=plan.rollout_step,
            step_in_rollout=plan.step_in_rollout,
            weight_version_in=plan.weight_version_in,
            weight_version_out=plan.weight_version_out,
            models=models,
            old_log_probs_N=old_log_probs_N,
            old_values_N=old_values_N,
            data_time_s=data_time_s,
        )
        yield plan, batch, replace(result, routing=routing) if routing else result
        routing = []


def _old_log_probs(
    state: TrainState,
    reader: Reader,
    planned: Sequence[PlannedStep],
    batches: Sequence[tuple[Batch, Partition, float]],
    algorithm: AlgorithmSettings,
    old_actor: FrozenModel | None,
) -> list[npt.NDArray[np.float32] | None]:
    """For each step, what is handed in as old log-probs; None: the step's own current ones."""
    nothing: list[npt.NDArray[np.float32] | None] = [None] * len(planned)
    if algorithm.use_rollout_logprobs:
        return nothing
    given = [plan.old_log_probs_N for plan in planned]
    if any(one is not None for one in given):
        return given
    if planned[0].step_in_rollout:
        # A fork in the middle of a rollout: the policy before its first step is not this state,
        # but the steps that were recorded say what it thought.
        source = _first_taken_on(reader, planned[0])
        _require_old_log_probs(reader, planned[0], source)
        return [_recorded_signal(reader, batch, "log_probs", source) for batch, _, _ in batches]
    free = routes_freely(state.model, algorithm)
    if algorithm.keep_old_actor:
        if old_actor is None:
            raise InvalidArgument(
                explain(
                    "taking the steps of a rollout",
                    on="--keep-old-actor",
                    expected="the weights that the engine had",
                    found="none",
                    do="recorded trajectories bring the engine's log-probs: train on them with "
                    "--use-rollout-logprobs",
                )
            )
        return [
            score_policy(state, batch, cut_up, free_routing=free, chunks=old_actor.chunks)
            for batch, cut_up, _ in batches
        ]
    # The first step's are the detached current ones, bit for bit: it needs no forward, unless they
    # are asked for before the step.
    first = 0 if needs_old_log_probs(algorithm) else 1
    nothing[first:] = [
        score_policy(state, batch, cut_up, free_routing=free)
        for batch, cut_up, _ in batches[first:]
    ]
    return nothing


def _old_values(
    state: TrainState,
    reader: Reader,
    planned: Sequence[PlannedStep],
    batches: Sequence[tuple[Batch, Partition, float]],
    algorithm: AlgorithmSettings,
) -> list[npt.NDArray[np.float32] | None]:
    """For each step, the critic's values before the rollout's first step; None: it finds its own.

    Without a critic where one is needed, the step says so.
    """
    values: list[npt.NDArray[np.float32] | None] = [None] * len(planned)
    if not needs_values(algorithm) or state.critic is None:
        return values
    if planned[0].step_in_rollout:
        source = _first_taken_on(reader, planned[0])
        return [_recorded_signal(reader, batch, "values", source) for batch, _, _ in batches]
    values[1:] = [score_values(state.critic, batch, cut_up) for batch, cut_up, _ in batches[1:]]
    return values


def _first_taken_on(reader: Reader, plan: PlannedStep) -> str:
    """The branch that took the rollout's first step, where a fork goes on from its middle.

    The same samples may be trained on by other branches too, from other versions.
    """
    steps = reader.table("step_committed", ["weight_version_out", "branch"])
    made = steps.filter(pc.equal(steps["weight_version_out"], plan.weight_version_in))
    if not made.num_rows:
        raise _in_the_middle(
            f"version {plan.weight_version_in}", "the step that made it", "none", plan
        )
    return str(made["branch"][0].as_py())


def _require_old_log_probs(reader: Reader, plan: PlannedStep, branch: str) -> None:
    """Raise unless the log-probs that the rollout's steps recorded on `branch` are by the policy
    before its first one."""
    steps = reader.table("step_committed", ["rollout_step", "branch", "settings"])
    mine = pc.and_(
        pc.equal(steps["rollout_step"], plan.rollout_step), pc.equal(steps["branch"], branch)
    )
    for settings in set(steps.filter(mine)["settings"].to_pylist()):
        algorithm = json.loads(settings)["algorithm"]
        for name in ("use_rollout_logprobs", "keep_old_actor"):
            if algorithm.get(name):
                raise _in_the_middle(
                    f"branch {branch!r}",
                    "signals with the log-probs by the policy before the rollout's first step",
                    f"steps with --{name.replace('_', '-')}, which recorded others",
                    plan,
                )


def _in_the_middle(on: str, expected: str, found: str, plan: PlannedStep) -> NotFound:
    return NotFound(
        explain(
            "going on in the middle of a rollout",
            on=f"rollout step {plan.rollout_step}, {on}",
            expected=expected,
            found=found,
            do="fork at a version between two rollouts, or give --use-rollout-logprobs",
        )
    )


def _recorded_signal(
    reader: Reader, batch: Batch, name: str, branch: str
) -> npt.NDArray[np.float32]:
    """[N] `log_probs` or `values` by the models before the rollout's first step, from the first
    signal that `branch` recorded of each sample.

    Raises NotFound where a sample of the batch has none.
    """
    signals = reader.table("signal_recorded", ["index", "branch", name])
    signals = signals.filter(pc.equal(signals["branch"], branch))
    if signals[name].null_count:
        signals = signals.filter(signals[name].is_valid())
    indices_S = signals["index"].to_numpy()
    rows = []
    for index in batch.indices_B.tolist():
        found = np.flatnonzero(indices_S == index)
        if not len(found):
            raise NotFound(
                explain(
                    "going on in the middle of a rollout",
                    on=f"sample {index}, branch {branch!r}",
                    expected=f"a signal_recorded event with the {name} before the rollout's first "
                    "step",
                    found="none",
                    do="fork at a version between two rollouts, or give --use-rollout-logprobs",
                )
            )
        rows.append(int(found[0]))
    taken = signals[name].take(rows).combine_chunks()
    values: npt.NDArray[np.float32] = taken.flatten().to_numpy()
    return values
