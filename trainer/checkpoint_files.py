"""The files of a checkpoint folder: manifest, hashes, and what to say when one differs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ledger.errors import Corrupt, IncompatibleFormat, NotFound, explain
from ledger.weights import TensorRecord, first_difference, weights_root
from trainer.checkpoint_formats import DIST_FORMAT, FORMAT
from trainer.digests import records_of
from trainer.weights import WEIGHTS_FILE, read_safetensors
from trainer.weights.files import is_weights_file

__all__ = [
    "OPTIMIZER_FILE",
    "RANDOM_FILE",
    "STATE_FILE",
    "check_digest",
    "check_files",
    "check_tensors",
    "file_hash",
    "hashes_of",
    "random_file",
    "read_manifest",
    "read_tensors",
    "sync",
]

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random_state.safetensors"
STATE_FILE = "trainer_state.json"


def random_file(rank: int) -> str:
    """The file with the states of a rank's generators."""
    return RANDOM_FILE if rank == 0 else f"random_state_{rank:05d}.safetensors"


def read_manifest(folder: Path, where: str | None = None) -> dict[str, Any]:
    """What trainer_state.json says; `where` names the folder in errors.

    Raises NotFound without folder or file, Corrupt where it is damaged, IncompatibleFormat for
    another format.
    """
    path = folder / STATE_FILE
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        form = manifest["format"]
    except FileNotFoundError:
        raise NotFound(
            explain(
                "reading a checkpoint",
                on=where or str(folder),
                expected=f"a folder with {STATE_FILE}",
                found="no such file" if folder.is_dir() else "no such folder",
                do="restore the folder, or start from another version that has a checkpoint",
            )
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            explain("reading a checkpoint", on=str(path), expected=FORMAT, found=repr(error))
        ) from error
    if form not in (FORMAT, DIST_FORMAT):
        raise IncompatibleFormat(
            explain(
                "reading a checkpoint",
                on=str(path),
                expected=f"{FORMAT} or {DIST_FORMAT}",
                found=form,
            )
        )
    return manifest


def hashes_of(manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """File name → blake3 of every file that the manifest lists (all but itself)."""
    return {name: bytes.fromhex(entry["blake3"]) for name, entry in manifest["files"].items()}


def check_files(
    folder: Path,
    hashes: Mapping[str, bytes],
    records: Sequence[TensorRecord] | None,
    *,
    where: str | None = None,
) -> None:
    """Compare files with their hashes (name → blake3), reading each once.

    Raises NotFound naming a missing file; Corrupt naming the first that differs (by name) with both
    hashes and, where `records` or the manifest know its tensors, the first tensor that differs.
    """
    where = where or str(folder)
    for name, expected in sorted(hashes.items()):
        path = folder / name
        if not path.is_file():
            raise NotFound(
                explain(
                    "reading a checkpoint",
                    on=where,
                    expected=f"file {name}",
                    found="no such file",
                    do="restore the file, or start from another version that has a checkpoint",
                )
            )
        found = file_hash(path)
        if found == expected:
            continue
        differing = _first_differing_tensor(folder, name, records)
        raise Corrupt(
            explain(
                "reading a checkpoint",
                on=f"{where}, file {name}" + (f", {differing}" if differing else ""),
                expected=f"blake3 {expected.hex()}",
                found=f"blake3 {found.hex()}",
                do="restore the file from a copy, or start from another version",
            )
        )


def _first_differing_tensor(
    folder: Path, name: str, records: Sequence[TensorRecord] | None
) -> str | None:
    """Which tensor of a changed file differs, as far as checksums are known."""
    try:
        if is_weights_file(name) and records is not None:
            return first_difference(records, records_of(sorted(read_safetensors(folder).items())))
        if name == OPTIMIZER_FILE:
            known = read_manifest(folder)["moments"]
            found = records_of(sorted(read_tensors(folder / name, str(folder)).items()))
            expected = [
                TensorRecord(r.name, r.dtype, r.shape, bytes.fromhex(known[r.name]))
                for r in found
                if r.name in known
            ]
            return first_difference(expected, found)
    except Corrupt as error:
        return f"which cannot be parsed ({str(error).splitlines()[-1].strip()})"
    return None


def check_tensors(
    expected: Sequence[TensorRecord], found: Sequence[TensorRecord], where: str
) -> None:
    """Raise Corrupt, naming the first tensor that differs with both checksums."""
    differing = first_difference(expected, found)
    if differing is not None:
        raise Corrupt(
            explain(
                "reading a checkpoint",
                on=f"{where}, file {WEIGHTS_FILE}, {differing}",
                expected=f"weights with root {weights_root(expected).hex()}",
                found=f"root {weights_root(found).hex()}",
                do="restore the file from a copy, or start from another version",
            )
        )


def check_digest(
    what: str,
    found: bytes,
    manifest: Mapping[str, Any],
    recorded: bytes | None,
    where: str,
) -> None:
    """Compare a digest with the recorded one, or else with the manifest's; raise Corrupt."""
    expected = recorded if recorded is not None else bytes.fromhex(manifest[f"{what}_digest"])
    if found != expected:
        raise Corrupt(
            explain(
                "reading a checkpoint",
                on=f"{where}, {what.replace('_', ' ')}",
                expected=f"digest {expected.hex()}",
                found=f"digest {found.hex()}",
                do="restore the folder from a copy, or start from another version",
            )
        )


def read_tensors(path: Path, where: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file. Raises NotFound or Corrupt."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise NotFound(
            explain("reading a checkpoint", on=where, expected=f"file {path.name}", found="none")
        ) from None
    except SafetensorError as error:
        raise Corrupt(
            explain("reading a checkpoint", on=str(path), expected="safetensors", found=error)
        ) from error


def file_hash(path: Path) -> bytes:
    """blake3 (32 bytes) of a file."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.digest()


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
