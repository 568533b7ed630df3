"""Checkpoints of a training as it goes on, and the events that make them real.

A checkpoint_saved event is appended once its folder is complete and synced, never before: a process
that is killed while files are written leaves neither event nor folder of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ledger.events import CheckpointSaved
from ledger.store import Ledger
from ledger.writer import Writer
from trainer.checkpoint import (
    FORMAT,
    PendingCheckpoint,
    SavedCheckpoint,
    begin_checkpoint,
    save_checkpoint,
)
from trainer.state import TrainState

__all__ = ["Saver", "checkpoint_of"]


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the versions of one branch. Every rank has one and calls it at the same places."""

    ledger: Ledger
    writer: Writer | None
    """None on other ranks than 0."""
    checkpoints: Path
    """The folder that a version's folder is made in."""
    model_dir: Path
    """Tokenizer and configuration, copied into every checkpoint."""
    form: str = FORMAT
    in_background: bool = False
    _pending: tuple[PendingCheckpoint, int, int | None] | None = None

    def save(self, state: TrainState, *, weight_version: int, step: int | None) -> None:
        """Save a version: it is recorded on return, or, in the background, in a later `collect`."""
        self.collect(wait=True)
        folder = self.checkpoints / f"v{weight_version:06d}"
        if not self.in_background:
            saved = save_checkpoint(state, folder, model_dir=self.model_dir, form=self.form)
            self._record(saved, weight_version, step)
            return
        pending = begin_checkpoint(
            state, folder, model_dir=self.model_dir, form=self.form, in_background=True
        )
        self._pending = pending, weight_version, step

    def collect(self, *, wait: bool) -> None:
        """Record what the background has finished; with `wait`, whatever it has begun."""
        if self._pending is None:
            return
        pending, weight_version, step = self._pending
        if wait or pending.is_done():
            self._pending = None
            self._record(pending.finish(), weight_version, step)

    def abandon(self) -> None:
        """Stop what the background is writing; it never happened. Not collective."""
        if self._pending is not None:
            self._pending[0].abandon()
            self._pending = None

    def _record(self, saved: SavedCheckpoint, weight_version: int, step: int | None) -> None:
        if self.writer is not None:
            self.writer.append([_event(self.ledger, saved, weight_version, step)])


def checkpoint_of(
    ledger: Ledger,
    state: TrainState,
    folder: Path,
    *,
    model_dir: Path,
    weight_version: int,
    step: int | None,
) -> CheckpointSaved:
    """Write the state of a version to `folder`, durably, and give the event that says so.

    By canonical names: a run's first version is what engines and references start from.
    """
    return _event(ledger, save_checkpoint(state, folder, model_dir=model_dir), weight_version, step)


def _event(
    ledger: Ledger, saved: SavedCheckpoint, weight_version: int, step: int | None
) -> CheckpointSaved:
    absolute = saved.directory.absolute()
    if ledger.root is not None and absolute.is_relative_to(ledger.root):
        location = absolute.relative_to(ledger.root)
    else:
        location = absolute
    return CheckpointSaved(
        weight_version=weight_version,
        step=step,
        weights_root=saved.weights_root,
        optimizer_digest=saved.optimizer_digest,
        random_state_digest=saved.random_state_digest,
        format=saved.format,
        location=str(location),
        files=list(saved.files),
        file_hashes=list(saved.file_hashes),
        file_sizes=np.array(saved.file_sizes, np.int64),
        save_time_s=saved.save_time_s,
    )
