"""The exact state of any version: the nearest checkpoint before it, and the steps after it again.

Every step that is run again is compared with what was recorded. A difference is handed to whoever
asked for the replay; `restore` raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

from ledger.encode import events_of
from ledger.errors import Diverged, NotFound, explain
from ledger.events import CheckpointSaved, SignalRecorded, StepCommitted
from ledger.store import Ledger
from trainer.checkpoint import DIST_FORMAT, load_checkpoint
from trainer.checkpoint_files import check_files
from trainer.compare import Divergence, compare_signals, compare_steps, records_of_event
from trainer.history import History
from trainer.microbatch import recorded_partition
from trainer.model import build_chunks, read_config
from trainer.ranks import by_writer
from trainer.reconfigure import reconfigure
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings
from trainer.state import TrainState, create_state, load_weights
from trainer.stepping import PlannedStep, recorded_settings, take_rollout

__all__ = [
    "StepAgain",
    "check_checkpoint",
    "checkpoint_folder",
    "load_reference",
    "load_version",
    "needs_reference",
    "replay_steps",
    "restore",
]


@dataclass(frozen=True, slots=True)
class StepAgain:
    """A recorded step that was run again."""

    recorded: StepCommitted
    divergence: Divergence | None
    """None: every bit is as recorded."""


def checkpoint_folder(ledger: Ledger, event: CheckpointSaved) -> Path:
    """Where a checkpoint's files are: its location is absolute, or relative to the ledger."""
    return ledger.locate(event.location)


def check_checkpoint(ledger: Ledger, history: History, version: int) -> Path:
    """Compare every byte of a version's checkpoint with what was recorded; returns its folder.

    Raises NotFound where the folder or a file is gone; Corrupt with version, file, both hashes and
    the first tensor that differs.
    """
    event = history.checkpoints[version]
    folder = checkpoint_folder(ledger, event)
    where = f"run {history.run_id!r}, version {version}" + (
        "" if event.step is None else f" (made by step {event.step})"
    )
    if not folder.is_dir():
        raise NotFound(
            explain(
                "reading the checkpoint of a version",
                on=where,
                expected=f"the folder {folder}, as its checkpoint_saved event says",
                found="no such folder",
                do="put the folder back from a copy, or pass --ignore-checkpoint "
                f"{version} to ledger-train, which runs the steps before it again",
            )
        )
    check_files(
        folder,
        dict(zip(event.files, event.file_hashes, strict=True)),
        records_of_event(history.weights[version]),
        where=f"{where}, {folder}",
    )
    return folder


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
    return state


def needs_reference(algorithm: AlgorithmSettings) -> bool:
    """Whether a step with these settings takes log-probs of the reference policy."""
    return algorithm.use_kl_loss or algorithm.kl_coef != 0


def load_reference(ledger: Ledger, history: History, parallel: ParallelSettings) -> Any:
    """The reference policy, frozen: the run's first version, from its checkpoint, checked."""
    first = min(v for v, w in history.weights.items() if w.parent_version is None)
    folder = by_writer(lambda: check_checkpoint(ledger, history, first))
    chunks = build_chunks(read_config(folder), parallel, trainable=False)
    load_weights(chunks, folder)
    return chunks


def replay_steps(
    state: TrainState,
    ledger: Ledger,
    history: History,
    versions: Sequence[int],
    *,
    reference: Any = None,
) -> Iterator[StepAgain]:
    """Run the recorded steps that made `versions` again, in order, each with its own settings.

    `state` must be that of the parent of the first one. The batch is read from the ledger as it
    stood when the step read it: what was scored again since does not change the past. Each step
    runs with the thread count it was recorded with, and is yielded with the first difference, if
    any; the caller decides whether to go on.
    """
    threads = torch.get_num_threads()
    try:
        yield from _replay_groups(state, ledger, history, versions, reference)
    finally:
        torch.set_num_threads(threads)


def _replay_groups(
    state: TrainState, ledger: Ledger, history: History, versions: Sequence[int], reference: Any
) -> Iterator[StepAgain]:
    for _, group in groupby(
        versions, key=lambda v: (history.branch_of[v], history.steps[v].rollout_step)
    ):
        recorded = [history.steps[v] for v in group]
        settings = recorded_settings(recorded[0])
        reader = ledger.reader(history.run_id, branch=None, as_of=recorded[0].read_seq)
        reconfigure(state, settings.optimizer)
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
            )
            for one in recorded
        ]
        taken = take_rollout(
            state, reader, planned, settings.algorithm, settings.sizes, reference=reference
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
    ignore: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainState:
    """The exact state of `version`: weights, optimizer, schedule and random state.

    `optimizer` are the settings to start the nearest checkpoint's state with; steps that are run
    again take their own. `ignore` is as in `History.from_checkpoint`; `tell` hears what is going
    on. Raises what `load_version` raises, and Diverged where a step that is run again does not give
    the recorded bits: then nothing can be built on it here.
    """
    start, *following = history.from_checkpoint(version, ignore)
    state = load_version(ledger, history, start, parallel=parallel, optimizer=optimizer, seed=seed)
    if not following:
        return state
    reference = None
    if any(needs_reference(recorded_settings(history.steps[v]).algorithm) for v in following):
        reference = load_reference(ledger, history, parallel)
    tell(f"restoring version {version}: {len(following)} steps after the checkpoint of {start}")
    for again in replay_steps(state, ledger, history, following, reference=reference):
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
