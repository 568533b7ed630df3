"""Where a version's checkpoint is, and whether its bytes are those recorded."""

from __future__ import annotations

from pathlib import Path

from ledger.errors import NotFound, explain
from ledger.events import CheckpointSaved
from ledger.store import Ledger
from trainer.checkpoint_files import check_files
from trainer.compare import records_of_event
from trainer.history import History

__all__ = ["check_checkpoint", "checkpoint_folder"]


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
