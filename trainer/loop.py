"""The loop: rollouts come in through the ledger, a step is taken, its weights go out.

Trainer and rollout side meet only here and in the ledger; what the loop knows of the rollout side
is `RolloutSide`. With several ranks all run the loop in step: rank 0 samples, decides and writes,
the others hear what comes next and compute their part of it. Every stage is committed before the
next one begins, and looks at what is committed before it does anything, so that a process which
starts again goes on where the last one was killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from ledger.encode import events_of
from ledger.errors import Diverged, explain
from ledger.evaluations import Evaluation
from ledger.events import EvalScored, StepCommitted, WeightsPublished
from ledger.numbering import VERSION_SPAN, local_number, run_number
from ledger.store import Ledger
from ledger.weights import TensorRecord, first_difference
from ledger.writer import Writer
from trainer.compare import compare_steps, records_of_event
from trainer.frozen import FrozenModel, StepModels
from trainer.history import History
from trainer.processes import from_writer, is_writer, wait_for_head
from trainer.progress import StepProgress
from trainer.saving import Saver
from trainer.selection import select_kept
from trainer.settings import AlgorithmSettings, BatchSettings
from trainer.staleness import require_fresh
from trainer.state import TrainState
from trainer.step import StepResult
from trainer.stepping import PlannedStep, take_rollout
from trainer.tracking import Tracker

__all__ = ["LoopSummary", "Place", "RolloutOutcome", "RolloutSide", "TrainingLoop"]


class RolloutOutcome(Protocol):
    """What the loop needs to know of a rollout step."""

    @property
    def mean_reward(self) -> float:
        """Mean raw reward of all samples, dropped ones included."""

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""


class RolloutSide(Protocol):
    """Samples, verifies and evaluates with the weights it was last given."""

    @property
    def name(self) -> str:
        """Of the engine."""

    @property
    def transport(self) -> str:
        """How weights reach the engine: as in `weights_published`."""

    @property
    def acknowledged_by(self) -> list[str]:
        """Engines whose own checksums `load_weights` compares."""

    @property
    def evaluates(self) -> bool:
        """Whether the loop asks it for evaluations; else they are none of its business."""

    def location(self, version: int) -> str | None:
        """Where the bytes of a version lie after `load_weights`, if anywhere."""

    def rollout(self, rollout_step: int, consumer_version: int) -> RolloutOutcome:
        """Write the events of a rollout step, those that are not there yet.

        `consumer_version` is the one before the first optimizer step that trains on it.
        """

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """What evaluations measure on, each with a name of its own."""

    def evaluate(self, version: int, name: str) -> EvalScored:
        """Measure the weights that are loaded, by the evaluation of that name."""

    def load_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """Stop, take new weights, and return records of the engine's own parameters."""

    def release(self, version: int) -> None:
        """Let requests run again."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next rollout of a branch stands."""

    weight_version: int
    """The version before its first step."""
    step: int
    """Number of its first step."""
    rollout_step: int


@dataclass(slots=True)
class LoopSummary:
    """What a process did."""

    steps: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean raw reward of each rollout step of this process."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by stage."""

    def spent(self, stage: str, since: float) -> None:
        """Add the seconds since `since` (time.perf_counter) to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - since


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """One branch of one run, from where it stands to its end."""

    ledger: Ledger
    run_id: str
    branch: str
    writer: Writer | None
    """None on other ranks than 0, which write nothing."""
    state: TrainState
    models: StepModels
    """The frozen models that the steps ask."""
    old_actor: FrozenModel | None
    """With --keep-old-actor: the weights that the engine has."""
    engine_version: int
    """The version that the engine has."""
    update_weights_interval: int
    """Rollout steps between two times that the engine gets the weights."""
    publish_each_step: bool
    """Whether it gets those between the steps of a rollout too, which nothing is sampled with."""
    algorithm: AlgorithmSettings
    sizes: BatchSettings
    rollout_side: RolloutSide | None
    """None: recorded trajectories, and no evaluation; or another rank than 0."""
    has_engine: bool
    """Whether rank 0 has a rollout side, so that every rank takes part in giving it weights."""
    recorded: Sequence[StepCommitted] | None
    """The steps whose samples are trained on again; None: fresh rollouts."""
    history: History
    """As it was when the process began: steps of this branch after `place` are taken again and
    compared, not appended."""
    place: Place
    fork_version: int | None
    """The version that the branch forked from; None for a run's first branch."""
    num_rollout: int
    save_interval: int
    eval_interval: int | None
    saver: Saver
    progress: StepProgress
    max_weight_staleness: int | None = None
    """Of the tokens of fresh rollouts; see `trainer.staleness`."""
    tracker: Tracker | None = None
    """Where the metrics of committed events go besides the ledger."""
    summary: LoopSummary = field(default_factory=LoopSummary)
    _saved: set[int] = field(default_factory=set)
    _evaluated: set[tuple[int, Evaluation]] = field(default_factory=set)
    _sampled: RolloutOutcome | None = None
    _made: WeightsPublished | None = None
    """The version that the last step made."""

    def run(self) -> Place:
        """Train to the end; returns the place after it. Raises whatever a stage raises."""
        scored = self.ledger.reader(self.run_id, branch=None).table("eval_scored")
        self._evaluated.update(
            (e.weight_version, Evaluation.of(e)) for e in events_of(scored, EvalScored)
        )
        try:
            self._run()
        except BaseException:
            self.saver.abandon()
            raise
        return self.place

    def _run(self) -> None:
        for rollout_step, samples in self._rollouts():
            if is_writer():
                self._evaluate_if_due(rollout_step)
                if samples is None:
                    samples = self._fresh(rollout_step)
            self._train(rollout_step, samples)
            if (rollout_step + 1) % self.save_interval == 0:
                self._save()
        behind = self.engine_version != self.place.weight_version
        if behind and self.has_engine and self.eval_interval is not None:
            version = self.place.weight_version
            self._publish(self._made or self.history.weights[version])
            self._engine_has(version)
        if is_writer():
            self._evaluate_if_due(None)
        self._save()
        self.saver.collect(wait=True)

    def _rollouts(self) -> Iterable[tuple[int, list[np.ndarray] | None]]:
        if self.recorded is None:
            for rollout_step in range(self.place.rollout_step, self.num_rollout):
                yield rollout_step, None
            return
        for rollout_step, group in groupby(self.recorded, key=lambda one: one.rollout_step):
            yield rollout_step, [one.indices for one in group]

    def _fresh(self, rollout_step: int) -> list[np.ndarray]:
        """Sample the rollout step; the samples of each of its optimizer steps."""
        if self.rollout_side is None:
            raise RuntimeError("a loop over fresh rollouts was made without a rollout side")
        began = time.perf_counter()
        self.progress.doing(f"rollout {rollout_step}")
        outcome = self.rollout_side.rollout(rollout_step, self.place.weight_version)
        self._sampled = outcome
        self.summary.spent("rollout", began)
        self.summary.rewards.append(outcome.mean_reward)
        self.summary.tokens += outcome.tokens
        began = time.perf_counter()
        kept = select_kept(
            self.ledger.reader(self.run_id, self.branch),
            rollout_step,
            n_rollouts=self.sizes.rollout_batch_size * self.sizes.n_samples_per_prompt,
            n_steps=self.sizes.num_steps_per_rollout,
        )
        if self.max_weight_staleness is not None:
            require_fresh(
                self.ledger.reader(self.run_id, self.branch),
                np.concatenate(kept),
                consumer_version=self.place.weight_version,
                bound=self.max_weight_staleness,
            )
        self.summary.spent("select", began)
        return kept

    def _train(self, rollout_step: int, samples: Sequence[np.ndarray] | None) -> None:
        """Take the steps of a rollout; on other ranks than 0, `samples` are what rank 0 says."""
        self.progress.doing(f"step {self.place.step}")
        head_seq, decided = from_writer((self.ledger.run(self.run_id).head_seq, samples))
        if decided is None:
            raise RuntimeError("a rollout step was to be trained without samples")
        wait_for_head(self.ledger, self.run_id, head_seq)
        planned = self._plan(rollout_step, decided)
        reader = self.ledger.reader(self.run_id, branch=None, as_of=head_seq)
        began = time.perf_counter()
        for plan, _, result in take_rollout(
            self.state,
            reader,
            planned,
            self.algorithm,
            self.sizes,
            models=self.models,
            old_actor=self.old_actor,
        ):
            self.summary.spent("train", began)
            due = self._engine_is_due(plan, planned[-1])
            published = self._publish(result.weights) if due else result.weights
            began = time.perf_counter()
            if self.writer is None:
                pass
            elif plan.weight_version_out in self.history.steps:
                self._compare(plan, result)
            else:
                committed = result.step_committed.evolve(read_seq=head_seq)
                self.writer.append([*result.routing, *result.signals, committed, published])
                self._track(committed)
            self.summary.spent("append", began)
            if due:
                self._engine_has(plan.weight_version_out)
            self.summary.steps += 1
            self._made = result.weights
            self.place = Place(plan.weight_version_out, plan.step + 1, rollout_step + 1)
            self._show(plan, result)
            self.saver.collect(wait=False)
            began = time.perf_counter()

    def _engine_is_due(self, plan: PlannedStep, last: PlannedStep) -> bool:
        """Whether the engine gets the weights that a step makes."""
        if self.update_weights_interval == 1 and self.publish_each_step:
            return True
        return plan is last and (plan.rollout_step + 1) % self.update_weights_interval == 0

    def _engine_has(self, version: int) -> None:
        """The engine took the present weights, and their event is committed: go on with them."""
        if self.rollout_side is not None:
            self.rollout_side.release(version)
        if self.old_actor is not None:
            self.old_actor.copy_from(self.state)
        self.engine_version = version

    def _plan(self, rollout_step: int, samples: Sequence[np.ndarray]) -> list[PlannedStep]:
        planned = []
        version = self.place.weight_version
        branch_number = self.ledger.branch_number(self.run_id, self.branch)
        first_in_rollout = 0
        if self.recorded is not None:
            first_in_rollout = next(
                one.step_in_rollout for one in self.recorded if one.rollout_step == rollout_step
            )
        for number, indices in enumerate(samples):
            step = self.place.step + number
            made = run_number(branch_number, local_number(version, VERSION_SPAN) + 1, VERSION_SPAN)
            planned.append(
                PlannedStep(
                    step=step,
                    rollout_step=rollout_step,
                    step_in_rollout=first_in_rollout + number,
                    weight_version_in=version,
                    weight_version_out=made,
                    indices=indices,
                )
            )
            version = made
        return planned

    def _publish(self, weights: WeightsPublished) -> WeightsPublished:
        """Hand the weights to the engine, which stays stopped; compare its own checksums."""
        if self.rollout_side is None:
            if self.has_engine:
                for _ in self.state.export_weights():
                    pass  # this rank's shards go to rank 0, which hands them to the engine
            return weights
        began = time.perf_counter()
        version = weights.weight_version
        found = self.rollout_side.load_weights(version, self.state.export_weights())
        difference = first_difference(records_of_event(weights), found)
        if difference is not None:
            raise Diverged(
                explain(
                    "publishing weights to the engine",
                    on=f"version {version}, engine {self.rollout_side.name}",
                    expected="the checksums of the trainer's weights",
                    found=difference,
                    do="nothing was committed; start the command again",
                )
            )
        self.summary.spent("publish", began)
        return weights.evolve(
            transport=self.rollout_side.transport,
            location=self.rollout_side.location(version),
            acknowledged_by=self.rollout_side.acknowledged_by,
            transfer_time_s=time.perf_counter() - began,
        )

    def _compare(self, plan: PlannedStep, result: StepResult) -> None:
        """A step that was committed before the process was killed was taken again."""
        divergence = compare_steps(
            self.history.steps[plan.weight_version_out],
            result.step_committed,
            self.history.weights[plan.weight_version_out],
            result.weights,
        )
        if divergence is not None:
            raise Diverged(
                explain(
                    "going on in the middle of a rollout",
                    on=f"run {self.run_id!r}, branch {self.branch!r}",
                    expected="the recorded bits",
                    found=str(divergence),
                )
            )

    def _save(self) -> None:
        version = self.place.weight_version
        if version in self._saved or version in self.history.checkpoints:
            return
        began = time.perf_counter()
        self.progress.doing(f"checkpoint of version {version}")
        self.saver.save(
            self.state,
            weight_version=version,
            step=self.place.step - 1 if self.place.step else None,
        )
        self._saved.add(version)
        self.summary.spent("checkpoint", began)

    def _evaluate_if_due(self, rollout_step: int | None) -> None:
        """Measure the engine's version before `rollout_step`, or, with None, at the end.

        A branch measures the version it forked from too, so that it has a point to start from.
        """
        version = self.engine_version
        if self.eval_interval is None:
            return
        inside = rollout_step is not None and version != self.fork_version
        if inside and (rollout_step or 0) % self.eval_interval:
            return
        if self.rollout_side is None or self.writer is None:
            raise RuntimeError("a loop with evaluations was made without a rollout side")
        if not self.rollout_side.evaluates:
            return
        for one in self.rollout_side.evaluations:
            if (version, one) in self._evaluated:
                continue
            began = time.perf_counter()
            self.progress.doing(f"evaluation {one.name} of version {version}")
            event = self.rollout_side.evaluate(version, one.name)
            self.writer.append([event])
            self._track(event)
            self._evaluated.add((version, one))
            self.progress.say(
                f"evaluation {one.name} of version {version}: mean reward "
                f"{event.mean_reward:.3f} on {len(event.rewards)} responses"
            )
            self.summary.spent("evaluation", began)

    def _track(self, event: StepCommitted | EvalScored) -> None:
        if self.tracker is not None:
            self.tracker.committed(event)

    def _show(self, plan: PlannedStep, result: StepResult) -> None:
        shown: dict[str, float] = {}
        tokens = result.step_committed.trained_tokens
        if self._sampled is not None:
            shown["reward"] = self._sampled.mean_reward
            tokens = self._sampled.tokens
        shown["trained_reward"] = result.metrics["reward_mean"]
        shown["loss"] = result.metrics["loss"]
        shown["grad_norm"] = result.metrics["grad_norm"]
        shown["mismatch"] = result.metrics["logprob_mismatch_max"]
        self.progress.step(plan.step, plan.weight_version_out, tokens, shown)
