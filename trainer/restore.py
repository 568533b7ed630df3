"""The exact state of any version: the nearest checkpoint before it, and the steps after it again.

Every step that is run again is compared with what was recorded. A difference is handed to whoever
asked for the replay; `restore` raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch

from ledger.encode import events_of
from ledger.errors import Diverged, explain
from ledger.events import SignalRecorded, StepCommitted
from ledger.store import Ledger
from trainer.checkpoint import CRITIC_FOLDER, load_checkpoint, load_critic
from trainer.checkpoint_files import STATE_FILE
from trainer.checkpoint_formats import DIST_FORMAT
from trainer.compare import Divergence, compare_signals, compare_steps, records_of_event
from trainer.history import History
from trainer.microbatch import recorded_partition
from trainer.ranks import by_writer
from trainer.reconfigure import reconfigure
from trainer.restore_checkpoint import check_checkpoint, checkpoint_folder
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import TrainState, create_state
from trainer.step_models import ModelLibrary, model_places
from trainer.stepping import PlannedStep, recorded_settings, take_rollout

__all__ = [
    "StepAgain",
    "check_checkpoint",
    "checkpoint_folder",
    "load_version",
    "replay_steps",
    "restore",
]


@dataclass(frozen=True, slots=True)
class StepAgain:
    """A recorded step that was run again."""

    recorded: StepCommitted
    divergence: Divergence | None
    """None: every bit is as recorded."""


def load_version(
    ledger: Ledger,
    history: History,
    version: int,
    *,
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    seed: int,
) -> TrainState:
    """A new state from the checkpoint of `version`, every byte of it checked.

    Raises NotFound where the checkpoint's folder or a file is gone, Corrupt where bytes differ from
    what was recorded (with version, file and first tensor).
    """
    folder = by_writer(lambda: check_checkpoint(ledger, history, version))
    event = history.checkpoints[version]
    state = create_state(folder, parallel, optimizer, seed=seed, load=event.format != DIST_FORMAT)
    load_checkpoint(
        state,
        folder,
        expected_records=records_of_event(history.weights[version]),
        expected_optimizer_digest=event.optimizer_digest,
        expected_random_state_digest=event.random_state_digest,
        version=version,
    )
    if f"{CRITIC_FOLDER}/{STATE_FILE}" in event.files:
        state.critic = load_critic(state, folder, optimizer, seed=seed, version=version)
    return state


def replay_steps(
    state: TrainState,
    ledger: Ledger,
    history: History,
    versions: Sequence[int],
    *,
    library: ModelLibrary,
) -> Iterator[StepAgain]:
    """Run the recorded steps that made `versions` again, in order, each with its own settings.

    `state` must be that of the parent of the first one. The batch is read from the ledger as it
    stood when the step read it: what was scored again since does not change the past. Each step
    runs with the thread count it was recorded with, and is yielded with the first difference, if
    any; the caller decides whether to go on. `library` finds the other models of the steps.
    """
    threads = torch.get_num_threads()
    try:
        yield from _replay_groups(state, ledger, history, versions, library)
    finally:
        torch.set_num_threads(threads)


def _replay_groups(
    state: TrainState,
    ledger: Ledger,
    history: History,
    versions: Sequence[int],
    library: ModelLibrary,
) -> Iterator[StepAgain]:
    for _, group in groupby(
        versions, key=lambda v: (history.branch_of[v], history.steps[v].rollout_step)
    ):
        recorded = [history.steps[v] for v in group]
        settings = recorded_settings(recorded[0])
        reader = ledger.reader(history.run_id, branch=None, as_of=recorded[0].read_seq)
        reconfigure(state, settings.optimizer)
        library.prepare_critic(state, settings.algorithm, settings.critic)
        torch.set_num_threads(recorded[0].num_threads)
        planned = [
            PlannedStep(
                step=one.step,
                rollout_step=one.rollout_step,
                step_in_rollout=one.step_in_rollout,
                weight_version_in=one.weight_version_in,
                weight_version_out=one.weight_version_out,
                indices=one.indices,
                partition=recorded_partition(one),
                # The weights of a kept old actor are not here: what they said is an input.
                old_log_probs_N=_recorded_log_probs(ledger, history, one)
                if settings.algorithm.keep_old_actor
                else None,
            )
            for one in recorded
        ]
        taken = take_rollout(
            state,
            reader,
            planned,
            settings.algorithm,
            settings.sizes,
            models=library.models_for(settings.algorithm, settings.models),
        )
        for was, (_, _, again) in zip(recorded, taken, strict=True):
            divergence = compare_steps(
                was,
                again.step_committed,
                history.weights[was.weight_version_out],
                again.weights,
            ) or compare_signals(
                _recorded_signals(ledger, history, was),
                again.signals,
                step=was.step,
                weight_version=was.weight_version_out,
            )
            yield StepAgain(recorded=was, divergence=divergence)


def _recorded_log_probs(
    ledger: Ledger, history: History, step: StepCommitted
) -> npt.NDArray[np.float32]:
    """[N] The old log-probs that a step recorded, in training order."""
    by_index = {signal.index: signal for signal in _recorded_signals(ledger, history, step)}
    return np.concatenate([by_index[index].log_probs for index in step.indices.tolist()])


def _recorded_signals(
    ledger: Ledger, history: History, step: StepCommitted
) -> list[SignalRecorded]:
    """What a step recorded of its samples."""
    reader = ledger.reader(history.run_id, branch=None)
    table = reader.table("signal_recorded", where={"step": (step.step, step.step)})
    mine = pc.and_(
        pc.equal(table["step"], step.step),
        pc.equal(table["branch"], history.branch_of[step.weight_version_out]),
    )
    return events_of(table.filter(mine), SignalRecorded)


def restore(
    ledger: Ledger,
    history: History,
    version: int,
    *,
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    seed: int,
    library: ModelLibrary | None = None,
    ignore: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainState:
    """The exact state of `version`: weights, optimizer, schedule and random state.

    `optimizer` are the settings to start the nearest checkpoint's state with; steps that are run
    again take their own, and the models that `library` finds (default: where the run's events say).
    `ignore` is as in `History.from_checkpoint`; `tell` hears what is going
    on. Raises what `load_version` raises, and Diverged where a step that is run again does not give
    the recorded bits: then nothing can be built on it here.
    """
    start, *following = history.from_checkpoint(version, ignore)
    state = load_version(ledger, history, start, parallel=parallel, optimizer=optimizer, seed=seed)
    if not following:
        return state
    if library is None:
        library = ModelLibrary(
            ledger=ledger,
            history=history,
            parallel=parallel,
            places=model_places({}, ledger, history.run_id),
            seed=seed,
        )
    tell(f"restoring version {version}: {len(following)} steps after the checkpoint of {start}")
    for again in replay_steps(state, ledger, history, following, library=library):
        tell(f"restored version {again.recorded.weight_version_out} by running its step again")
        if again.divergence is not None:
            raise Diverged(
                explain(
                    "restoring a version by running its steps again",
                    on=f"run {history.run_id!r}, version {version}, from the checkpoint of "
                    f"version {start}",
                    expected="the recorded bits",
                    found=str(again.divergence),
                    do="restore on the machine, thread count and package versions that recorded "
                    "it (see run_started.environment), or from a checkpoint of the version itself",
                )
            )
    return state
