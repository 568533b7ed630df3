"""Checkpoints: the whole state of a weight version in a folder, exact, whatever the layout.

Format "hf-safetensors-1", a Hugging Face model folder with three files more:

    model.safetensors          weights, canonical names; `transformers` loads the folder
    config.json, tokenizer …   as in the model folder that the run began with
    optimizer.safetensors      Adam's moments, exp_avg.<name> and exp_avg_sq.<name>; none before a
    step random_state.safetensors   states of all generators trainer_state.json         step
    count, scheduler, digests, checksums, and a hash of every file above

No pickle. Nothing in it depends on how Megatron laid the tensors out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from ledger.canonical import canonical_json
from ledger.errors import AlreadyExists, LedgerError, StorageFailed, explain
from ledger.weights import TensorRecord, weights_root
from trainer.checkpoint_files import (
    FORMAT,
    OPTIMIZER_FILE,
    RANDOM_FILE,
    STATE_FILE,
    check_digest,
    check_files,
    check_tensors,
    file_hash,
    hashes_of,
    read_manifest,
    read_tensors,
    sync,
)
from trainer.digests import optimizer_root, random_state_root, records_of
from trainer.state import TrainState
from trainer.weights import import_weights, read_safetensors, write_safetensors

__all__ = ["FORMAT", "SavedCheckpoint", "load_checkpoint", "save_checkpoint"]

_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of the model folder that go along as they are, where they exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What a `checkpoint_saved` event says."""

    format: str
    directory: Path
    weights_root: bytes
    optimizer_digest: bytes
    random_state_digest: bytes
    files: tuple[str, ...]
    """Names in the folder, sorted."""
    file_hashes: tuple[bytes, ...]
    """blake3 of each file."""
    file_sizes: tuple[int, ...]
    """Bytes of each file."""
    save_time_s: float


def save_checkpoint(
    state: TrainState, directory: str | Path, *, model_dir: str | Path
) -> SavedCheckpoint:
    """Write the state to `directory`, which appears whole or not at all.

    Everything is written and synced in a folder beside it, which is then renamed. A crash leaves at
    most such a folder (named `.<name>.…`), never a partial checkpoint. `model_dir` gives the
    tokenizer's files. Where the folder is there already with this very state, nothing is written.

    Raises AlreadyExists where it holds another state, Corrupt where its files are not what was
    written, StorageFailed where the store does not take it.
    """
    began = time.monotonic()
    target = Path(directory)
    manifest = _describe(state)
    if target.exists():
        return _existing(target, manifest, began)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            manifest = _write(state, work, Path(model_dir), manifest)
            try:
                os.rename(work, target)
            except OSError:
                if not target.exists():
                    raise
                return _existing(target, manifest, began)
            sync(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except LedgerError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageFailed(
            explain("saving a checkpoint", on=str(target), found=error, do="check the disk")
        ) from error
    return _saved(target, manifest, began)


def _describe(state: TrainState) -> dict[str, Any]:
    """Everything trainer_state.json says except the hashes of files."""
    moments = state.moment_records()
    return {
        "format": FORMAT,
        "weights_root": weights_root(state.tensor_records()).hex(),
        "optimizer_digest": state.optimizer_digest_from(moments).hex(),
        "random_state_digest": state.random_state_digest().hex(),
        "adam_step": state.adam_step(),
        "scheduler": state.scheduler.state_dict(),
        "moments": {record.name: record.checksum.hex() for record in moments},
    }


def _write(
    state: TrainState, work: Path, model_dir: Path, manifest: dict[str, Any]
) -> dict[str, Any]:
    write_safetensors(work, state.export_weights(), state.hf_config)
    save_file(dict(state.moments()), work / OPTIMIZER_FILE)
    save_file(state.generators, work / RANDOM_FILE)
    for name in _COPIED:
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, work / name)
    files = {}
    for path in sorted(work.iterdir()):
        sync(path)
        files[path.name] = {"blake3": file_hash(path).hex(), "size_bytes": path.stat().st_size}
    manifest = {**manifest, "files": files}
    (work / STATE_FILE).write_text(canonical_json(manifest) + "\n", encoding="utf-8")
    sync(work / STATE_FILE)
    sync(work)
    return manifest


def _existing(target: Path, manifest: dict[str, Any], began: float) -> SavedCheckpoint:
    found = read_manifest(target)
    for key in ("format", "weights_root", "optimizer_digest", "random_state_digest"):
        if found[key] != manifest[key]:
            raise AlreadyExists(
                explain(
                    "saving a checkpoint",
                    on=str(target),
                    expected=f"nothing there, or this state: {key} {manifest[key]}",
                    found=f"{key} {found[key]}",
                    do="save under another name",
                )
            )
    check_files(target, hashes_of(found), None)
    return _saved(target, found, began)


def _saved(target: Path, manifest: Mapping[str, Any], began: float) -> SavedCheckpoint:
    sizes = {name: int(entry["size_bytes"]) for name, entry in manifest["files"].items()}
    hashes = hashes_of(manifest)
    path = target / STATE_FILE
    sizes[STATE_FILE], hashes[STATE_FILE] = path.stat().st_size, file_hash(path)
    files = tuple(sorted(sizes))
    return SavedCheckpoint(
        format=FORMAT,
        directory=target,
        weights_root=bytes.fromhex(manifest["weights_root"]),
        optimizer_digest=bytes.fromhex(manifest["optimizer_digest"]),
        random_state_digest=bytes.fromhex(manifest["random_state_digest"]),
        files=files,
        file_hashes=tuple(hashes[name] for name in files),
        file_sizes=tuple(sizes[name] for name in files),
        save_time_s=time.monotonic() - began,
    )


def load_checkpoint(
    state: TrainState,
    directory: str | Path,
    *,
    expected_records: Sequence[TensorRecord] | None = None,
    expected_files: Mapping[str, bytes] | None = None,
    expected_optimizer_digest: bytes | None = None,
    expected_random_state_digest: bytes | None = None,
    version: int | None = None,
) -> None:
    """Make `state` exactly what was saved.

    The expectations are what the ledger recorded: `expected_records` of weights_published,
    `expected_files` (name → blake3) of checkpoint_saved. Without them the folder is checked against
    itself. The schedule's position is restored; its rates stay those of `state`'s own settings, so
    that a branch may go on with others.

    All files are checked before anything is changed.

    Raises NotFound where the folder or a file is missing; Corrupt where bytes differ, naming
    version, file and the first tensor that differs with both checksums.
    """
    folder = Path(directory)
    where = str(folder) if version is None else f"version {version}, {folder}"
    manifest = read_manifest(folder, where)
    hashes = hashes_of(manifest) if expected_files is None else dict(expected_files)
    check_files(folder, hashes, expected_records, where=where)
    weights = read_safetensors(folder)
    if expected_records is not None:
        check_tensors(expected_records, records_of(sorted(weights.items())), where)
    moments = read_tensors(folder / OPTIMIZER_FILE, where)
    random = read_tensors(folder / RANDOM_FILE, where)
    step, scheduler = int(manifest["adam_step"]), manifest["scheduler"]
    digest = optimizer_root(records_of(moments.items()), step, scheduler)
    check_digest("optimizer", digest, manifest, expected_optimizer_digest, where)
    check_digest(
        "random_state", random_state_root(random), manifest, expected_random_state_digest, where
    )
    import_weights(state.chunks, weights, placement=state.placement)
    state.load_moments(moments, step)
    state.scheduler.num_steps = int(scheduler["num_steps"])
    state.scheduler.step(0)
    state.generators = random
