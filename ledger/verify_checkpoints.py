"""Comparing the files of a checkpoint with the event that recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from ledger.events import CheckpointSaved

__all__ = ["compare_checkpoint"]


def compare_checkpoint(folder: Path, event: CheckpointSaved) -> Iterator[tuple[str, str, str]]:
    """Read every file that a checkpoint_saved event lists; what differs as (what, expected, found).

    `folder` is where the checkpoint is. Nothing is raised for what is missing or cannot be read:
    that is a difference too. Other files may lie in the folder.
    """
    if not folder.is_dir():
        yield "its folder", f"a folder {folder}", "no such folder"
        return
    sizes = event.file_sizes.tolist()
    for name, digest, size in zip(event.files, event.file_hashes, sizes, strict=True):
        expected = f"{size} bytes, blake3 {digest.hex()}"
        found = _describe(folder / name)
        if found != expected:
            yield f"file {name}", expected, found


def _describe(path: Path) -> str:
    """Size and hash of a file as they are now."""
    try:
        if not path.is_file():
            return "no such file"
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(path)
        return f"{path.stat().st_size} bytes, blake3 {hasher.hexdigest()}"
    except OSError as error:
        return f"it cannot be read: {error}"
