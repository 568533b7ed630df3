"""Checkpoints: the whole state of a weight version in a folder, exact.

Both formats are folders of a Hugging Face model with more beside it:

    config.json, tokenizer …   as in the model folder that the run began with
    random_state.safetensors   states of all generators of rank 0; random_state_00001 … of others
    trainer_state.json         format, layout, step count, scheduler, digests, checksums, and a hash
                               of every file below and above
    critic/                    where the run has a critic: the same files of it, by canonical names

"hf-safetensors-1" has the weights under canonical names, and depends on no layout:

    model.safetensors          `transformers` loads the folder
    optimizer.safetensors      Adam's moments, exp_avg.<name> and exp_avg_sq.<name>, and with 16-bit
                               weights main_weight.<name>; none before a step

"torch_dist-1" has Megatron's shards instead, see `trainer.checkpoint_dist`.

A state that is restored in another layout has the same weights and optimizer bit for bit; its
generators are then seeded anew, as those of other ranks mean nothing to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from ledger.canonical import canonical_json
from ledger.errors import AlreadyExists, LedgerError, StorageFailed, explain
from ledger.weights import TensorRecord, weights_root
from trainer.checkpoint_dist import Writing, read_shards, write_shards
from trainer.checkpoint_files import (
    OPTIMIZER_FILE,
    STATE_FILE,
    check_digest,
    check_files,
    check_tensors,
    file_hash,
    hashes_of,
    random_file,
    read_manifest,
    read_tensors,
    sync,
)
from trainer.checkpoint_formats import DIST_FORMAT, FORMAT
from trainer.critic import create_critic
from trainer.digests import optimizer_root, records_of
from trainer.ranks import by_all, by_writer, data_parallel_size, is_writer
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import TrainState
from trainer.weights import import_weights, write_safetensors
from trainer.weights.files import copy_model_files
from trainer.weights.handles import open_files

__all__ = [
    "CRITIC_FOLDER",
    "DIST_FORMAT",
    "FORMAT",
    "PendingCheckpoint",
    "SavedCheckpoint",
    "begin_checkpoint",
    "load_checkpoint",
    "load_critic",
    "save_checkpoint",
]

CRITIC_FOLDER = "critic"
"""Folder of the critic's files within a checkpoint."""


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
    state: TrainState, directory: str | Path, *, model_dir: str | Path, form: str = FORMAT
) -> SavedCheckpoint:
    """Write the state to `directory`, which appears whole or not at all. Collective.

    Everything is written and synced in a folder beside it, which is then renamed. A crash leaves at
    most such a folder (named `.<name>.…`), never a partial checkpoint. `model_dir` gives the
    tokenizer's files. Where the folder is there already with this very state, nothing is written.
    Every rank gets the same answer.

    Raises AlreadyExists where it holds another state, Corrupt where its files are not what was
    written, StorageFailed where the store does not take it.
    """
    return begin_checkpoint(state, directory, model_dir=model_dir, form=form).finish()


def begin_checkpoint(
    state: TrainState,
    directory: str | Path,
    *,
    model_dir: str | Path,
    form: str = FORMAT,
    in_background: bool = False,
) -> PendingCheckpoint:
    """Begin what `save_checkpoint` does; the state may go on at once. Collective.

    Only the shards of "torch_dist-1" are written in the background, by processes of their own.
    """
    began = time.monotonic()
    target = Path(directory)
    manifest = {**_describe(state), "format": form}
    if by_writer(target.exists):
        found = by_writer(lambda: _existing(target, manifest, began))
        return PendingCheckpoint(target, manifest, Path(model_dir), began, None, None, found, {})
    with _storage_failures(target):
        work = by_writer(lambda: _work_folder(target))
        pending = PendingCheckpoint(
            target, manifest, Path(model_dir), began, work, None, None, state.hf_config
        )
        try:
            if form == DIST_FORMAT:
                pending.writing = write_shards(state, work, in_background=in_background)
            else:
                _write_canonical(state, work)
            by_all(lambda: save_file(state.generators, work / random_file(_rank())))
            if state.critic is not None:
                _write_critic(state.critic, work / CRITIC_FOLDER)
        except BaseException:
            pending.abandon()
            raise
    return pending


@dataclass(slots=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is being written. No folder has its name yet."""

    target: Path
    manifest: dict[str, Any]
    model_dir: Path
    began: float
    """time.monotonic()."""
    work: Path | None
    """The folder that becomes `target`; None where that is there already."""
    writing: Writing | None
    found: SavedCheckpoint | None
    config: Mapping[str, Any]

    def is_done(self) -> bool:
        """Whether `finish` has nothing to wait for. Collective."""
        return self.writing is None or self.writing.is_done(wait=False)

    def finish(self) -> SavedCheckpoint:
        """Wait for what is being written, and give the folder its name. Collective.

        Raises as `save_checkpoint`.
        """
        if self.found is not None or self.work is None:
            return cast(SavedCheckpoint, self.found)
        work = self.work
        try:
            with _storage_failures(self.target):
                if self.writing is not None:
                    self.writing.is_done(wait=True)
                    self.writing = None
                hashes = by_all(lambda: _hash_own(work))
                entries = {name: entry for one in hashes for name, entry in one.items()}
                self.found = by_writer(lambda: self._publish(work, entries))
        finally:
            self.abandon()
        return self.found

    def _publish(self, work: Path, entries: dict[str, Any]) -> SavedCheckpoint:
        if not (work / "config.json").exists():
            text = json.dumps(self.config, indent=2, sort_keys=True, ensure_ascii=False)
            (work / "config.json").write_text(text + "\n", encoding="utf-8")
        copy_model_files(self.model_dir, work)
        entries |= _entries(work, without=entries)
        manifest = {**self.manifest, "files": entries}
        (work / STATE_FILE).write_text(canonical_json(manifest) + "\n", encoding="utf-8")
        sync(work / STATE_FILE)
        sync(work)
        try:
            os.rename(work, self.target)
        except OSError:
            if not self.target.exists():
                raise
            return _existing(self.target, self.manifest, self.began)
        sync(self.target.parent)
        return _saved(self.target, manifest, self.began)

    def abandon(self) -> None:
        """Stop writing, and remove what was written unless it has its name. Not collective."""
        if self.writing is not None:
            self.writing.abandon()
            self.writing = None
        if self.work is not None and is_writer():
            shutil.rmtree(self.work, ignore_errors=True)
        self.work = None


@contextlib.contextmanager
def _storage_failures(target: Path) -> Iterator[None]:
    try:
        yield
    except LedgerError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageFailed(
            explain("saving a checkpoint", on=str(target), found=error, do="check the disk")
        ) from error


def _rank() -> int:
    return int(dist.get_rank()) if dist.is_initialized() else 0


def _work_folder(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "expert_model_parallel_size",
)
ONE_RANK: dict[str, Any] = {
    **{name: getattr(ParallelSettings(), name) for name in _SIZES},
    "expert_tensor_parallel_size": 1,
    "data_parallel_size": 1,
}
"""The layout of checkpoints that name none."""


def layout_of(state: TrainState) -> dict[str, Any]:
    """The layout as a checkpoint names it: the sizes of the groups."""
    parallel = state.parallel
    expert_tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return {
        **{name: getattr(parallel, name) for name in _SIZES},
        "expert_tensor_parallel_size": expert_tensor,
        "data_parallel_size": data_parallel_size(),
    }


def _describe(state: TrainState) -> dict[str, Any]:
    """Everything trainer_state.json says except the format and the hashes of files."""
    moments = state.moment_records()
    critic = {}
    if state.critic is not None:
        described = _describe(state.critic)
        critic = {"critic": {key: described[key] for key in ("weights_root", "optimizer_digest")}}
    return {
        **critic,
        "weights_root": weights_root(state.tensor_records()).hex(),
        "optimizer_digest": state.optimizer_digest_from(moments).hex(),
        "random_state_digest": state.random_state_digest().hex(),
        "adam_step": state.adam_step(),
        "scheduler": state.scheduler.state_dict(),
        "moments": {record.name: record.checksum.hex() for record in moments},
        "layout": layout_of(state),
    }


def _write_canonical(state: TrainState, work: Path) -> None:
    """Weights and moments by canonical names; rank 0 writes what the ranks put together."""
    weights, moments = state.export_weights(), state.moments()
    if is_writer():
        write_safetensors(work, weights, state.hf_config)
        save_file(dict(moments), work / OPTIMIZER_FILE)
        return
    for _ in (*weights, *moments):
        pass


def _write_critic(critic: TrainState, folder: Path) -> None:
    """The critic's files, with a manifest of their own. Collective."""
    manifest = {**_describe(critic), "format": FORMAT}
    by_writer(folder.mkdir)
    _write_canonical(critic, folder)
    by_all(lambda: save_file(critic.generators, folder / random_file(_rank())))

    def describe() -> None:
        whole = {**manifest, "files": _entries(folder, without={})}
        (folder / STATE_FILE).write_text(canonical_json(whole) + "\n", encoding="utf-8")
        sync(folder)

    by_writer(describe)


def _entries(folder: Path, *, without: Mapping[str, Any]) -> dict[str, Any]:
    """Sync and hash the files of a folder and of those in it, by their path in the folder."""
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    return {name: _entry(path) for name, path in sorted(paths.items()) if name not in without}


def _hash_own(work: Path) -> dict[str, Any]:
    """Sync and hash the files that this rank wrote."""
    mine = {random_file(_rank())} | {path.name for path in work.glob(f"__{_rank()}_*.distcp")}
    return {name: _entry(work / name) for name in sorted(mine)}


def _entry(path: Path) -> dict[str, Any]:
    sync(path)
    return {"blake3": file_hash(path).hex(), "size_bytes": path.stat().st_size}


def _existing(target: Path, manifest: Mapping[str, Any], began: float) -> SavedCheckpoint:
    found = read_manifest(target)
    for key in ("weights_root", "optimizer_digest", "random_state_digest", "critic"):
        if found.get(key) != manifest.get(key):
            raise AlreadyExists(
                explain(
                    "saving a checkpoint",
                    on=str(target),
                    expected=f"nothing there, or this state: {key} {manifest.get(key)}",
                    found=f"{key} {found.get(key)}",
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
        format=manifest["format"],
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

    All files are checked before anything is changed. Collective: rank 0 reads every byte once, each
    rank then takes its part, whatever the layout that saved it. In another layout than that one the
    generators stay as they are.

    Raises NotFound where the folder or a file is missing; Corrupt where bytes differ, naming
    version, file and the first tensor that differs with both checksums. Every rank raises alike.
    """
    folder = Path(directory)
    where = str(folder) if version is None else f"version {version}, {folder}"
    manifest = by_writer(lambda: read_manifest(folder, where))
    hashes = hashes_of(manifest) if expected_files is None else dict(expected_files)
    by_writer(lambda: check_files(folder, hashes, expected_records, where=where))
    step, scheduler = int(manifest["adam_step"]), manifest["scheduler"]
    sharded = manifest["format"] == DIST_FORMAT
    if not sharded:
        by_writer(
            lambda: _check_canonical(
                folder, manifest, expected_records, expected_optimizer_digest, where
            )
        )
    _load_generators(state, folder, manifest, expected_random_state_digest, where)
    if sharded:
        kinds = sorted({name.split(".", 1)[0] for name in manifest["moments"]})
        read_shards(state, folder, step=step, kinds=kinds)
    else:
        import_weights(state.chunks, open_files(folder), placement=state.placement)
        state.load_moments(open_files([folder / OPTIMIZER_FILE]), step)
    state.scheduler.num_steps = int(scheduler["num_steps"])
    state.scheduler.step(0)
    if sharded:
        if expected_records is not None:
            check_tensors(expected_records, state.tensor_records(), where)
        digest = optimizer_root(state.moment_records(), step, scheduler)
        check_digest("optimizer", digest, manifest, expected_optimizer_digest, where)


def _check_canonical(
    folder: Path,
    manifest: Mapping[str, Any],
    expected_records: Sequence[TensorRecord] | None,
    expected_optimizer_digest: bytes | None,
    where: str,
) -> None:
    """Compare the tensors of "hf-safetensors-1" with their records, one at a time."""
    if expected_records is not None:
        weights = open_files(folder)
        found = records_of((name, weights[name][:]) for name in sorted(weights))
        check_tensors(expected_records, found, where)
    moments = read_tensors(folder / OPTIMIZER_FILE, where)
    digest = optimizer_root(
        records_of(moments.items()), int(manifest["adam_step"]), manifest["scheduler"]
    )
    check_digest("optimizer", digest, manifest, expected_optimizer_digest, where)


def _load_generators(
    state: TrainState,
    folder: Path,
    manifest: Mapping[str, Any],
    expected: bytes | None,
    where: str,
) -> None:
    if manifest.get("layout", ONE_RANK) != layout_of(state):
        return
    before = state.generators
    name = random_file(_rank())
    state.generators = by_all(lambda: read_tensors(folder / name, where))[_rank()]
    try:
        check_digest("random_state", state.random_state_digest(), manifest, expected, where)
    except BaseException:
        state.generators = before
        raise


def load_critic(
    state: TrainState,
    directory: Path,
    optimizer: OptimizerSettings,
    *,
    seed: int,
    version: int | None = None,
) -> TrainState:
    """The critic of a checkpoint, exactly as it was saved beside the policy. Collective.

    `state` is the policy's. Raises what `create_critic` and `load_checkpoint` raise.
    """
    folder = directory / CRITIC_FOLDER
    critic = create_critic(folder, state.hf_config, state.parallel, optimizer, seed=seed)
    load_checkpoint(critic, folder, version=version)
    return critic
