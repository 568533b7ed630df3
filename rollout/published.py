"""What a branch has published, as a process that samples with it follows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from ledger.encode import events_of
from ledger.errors import Corrupt, Diverged, LedgerError, NotFound, explain
from ledger.events import WeightsPublished
from ledger.weights import TensorRecord, first_difference

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["Published", "PublishedTensors", "PublishedVersions", "read_version"]

_CANONICAL = "hf-safetensors-1"
"""Format of checkpoints whose folder a model is loaded from."""


@dataclass(frozen=True, slots=True)
class Published:
    """One version: what it is, and where it may be."""

    version: int
    records: tuple[TensorRecord, ...]
    folders: tuple[Path, ...]
    """Model folders that hold it, or once did; the best first."""


class PublishedVersions:
    """The versions of one branch."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        *,
        num_steps_per_rollout: int,
        update_weights_interval: int = 1,
    ) -> None:
        """The run must have begun, and the branch be there."""
        self._ledger, self._run_id, self._branch = ledger, run_id, branch
        self._steps, self._interval = num_steps_per_rollout, update_weights_interval

    def first(self) -> tuple[int, int]:
        """The version that the branch begins with, and its first rollout step."""
        fork = self._ledger.branch(self._run_id, self._branch).fork_version
        everything = self._ledger.reader(self._run_id, branch=None)
        if fork is None:
            table = everything.table("weights_published", ["weight_version", "parent_version"])
            roots = table.filter(pc.is_null(table["parent_version"]))
            return int(roots["weight_version"][0].as_py()), 0
        steps = everything.table("step_committed", ["weight_version_out", "rollout_step"])
        made = steps.filter(pc.equal(steps["weight_version_out"], fork))
        return fork, int(made["rollout_step"][0].as_py()) + 1 if made.num_rows else 0

    def before(self, rollout_step: int, *, whole_interval: bool = True) -> int | None:
        """The version that `rollout_step` is sampled with when training and rollouts take turns.

        That is the one before its first optimizer step; with an interval of weight updates, before
        the rollout step that the interval divides, unless `whole_interval` is False. None: it is
        not there yet.
        """
        start, first = self.first()
        began = rollout_step // self._interval * self._interval if whole_interval else rollout_step
        began = max(began, first)
        if began == first:
            return start
        columns = ["rollout_step", "step_in_rollout", "weight_version_out", "branch"]
        steps = self._ledger.reader(self._run_id, self._branch).table("step_committed", columns)
        last = pc.and_(
            pc.equal(steps["rollout_step"], began - 1),
            pc.equal(steps["step_in_rollout"], self._steps - 1),
        )
        made = steps.filter(pc.and_(last, pc.equal(steps["branch"], self._branch)))
        return int(made["weight_version_out"][0].as_py()) if made.num_rows else None

    def newest(self) -> int:
        """The newest version of the branch, or the one it begins with."""
        reader = self._ledger.reader(self._run_id, self._branch)
        table = reader.table("weights_published", ["weight_version", "branch"])
        own = table.filter(pc.equal(table["branch"], self._branch))["weight_version"]
        return int(pc.max(own).as_py()) if len(own) else self.first()[0]

    def version(self, version: int) -> Published:
        """What a version is. Raises NotFound where the run has none of that number."""
        reader = self._ledger.reader(self._run_id, branch=None)
        table = reader.table("weights_published")
        found = events_of(
            table.filter(pc.equal(table["weight_version"], version)), WeightsPublished
        )
        if not found:
            raise NotFound(
                explain("loading weights", on=f"run {self._run_id!r}", expected=f"v{version}")
            )
        folders = [Path(found[0].location)] if found[0].location else []
        saved = reader.table("checkpoint_saved", ["weight_version", "format", "location"])
        saved = saved.filter(
            pc.and_(
                pc.equal(saved["weight_version"], version), pc.equal(saved["format"], _CANONICAL)
            )
        )
        folders += [self._ledger.locate(where) for where in saved["location"].to_pylist()]
        base = self._folder_of_versions()
        if base is not None:
            folders.append(base / self._run_id / self._branch / f"v{version:06d}")
        return Published(version, _records(found[0]), tuple(dict.fromkeys(folders)))

    def _folder_of_versions(self) -> Path | None:
        """Where the trainer puts versions that it publishes again, as it last said."""
        named = None
        reader = self._ledger.reader(self._run_id, self._branch)
        for kind in ("run_started", "branch_forked", "run_resumed"):
            for places in reader.table(kind, ["places"])["places"].to_pylist():
                named = json.loads(places or "{}").get("update_weight_disk_dir") or named
        if named is not None:
            return Path(named).absolute()
        return None if self._ledger.root is None else self._ledger.root / "weights"


def _records(event: WeightsPublished) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(name, dtype, tuple(int(n) for n in shape), checksum)
        for name, dtype, shape, checksum in zip(
            event.tensor_names,
            event.tensor_dtypes,
            event.tensor_shapes,
            event.tensor_checksums,
            strict=True,
        )
    )


class PublishedTensors:
    """The tensors of a version, read where they are asked for: once, by one engine or by each."""

    def __init__(self, published: Published) -> None:
        """Nothing is read yet."""
        self.published = published

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor of each; all of them were compared before the first one is given.

        Raises what `read_version` raises.
        """
        yield from read_version(self.published)[1].items()


def read_version(published: Published) -> tuple[Path, dict[str, Any]]:
    """The tensors of a version by canonical name, and the folder they are from.

    Every byte is compared with what was published; a folder that is gone or holds something else
    is passed over. Tensors of a model that the run began with are cast to the dtype that the run
    trains in, as the publication names it.

    Raises:
        NotFound: it is in none of its folders any more: newer versions took its place.
        Corrupt: a folder that has it has other bytes.
    """
    wrong: LedgerError | None = None
    for folder in published.folders:
        try:
            return folder, dict(_tensors(folder, published))
        except NotFound:
            continue
        except (Corrupt, Diverged) as error:
            wrong = error
    if wrong is not None:
        raise wrong
    raise NotFound(
        explain(
            "loading weights",
            on=f"version {published.version}",
            expected=f"a model folder: {', '.join(map(str, published.folders)) or 'none named'}",
            found="none of them here",
            do="both commands must see --update-weight-disk-dir under one path; a trainer that "
            "goes on publishes its version there again",
        )
    )


def _tensors(folder: Path, published: Published) -> Iterator[tuple[str, Any]]:
    import torch
    from safetensors import SafetensorError, safe_open

    from rollout.engines.parameters import record_views

    left = {record.name: record for record in published.records}
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise NotFound(explain("loading weights", on=str(folder), found="no model in it"))
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in set(file.keys()) & left.keys():
                    record = left.pop(name)
                    tensor = file.get_tensor(name).to(getattr(torch, record.dtype))
                    difference = first_difference([record], record_views({name: tensor}))
                    if difference is not None:
                        raise Diverged(
                            explain(
                                "loading weights",
                                on=f"version {published.version}, {path}",
                                expected="the bytes that were published",
                                found=difference,
                                do="start ledger-train again: it publishes its version again",
                            )
                        )
                    yield name, tensor
        except FileNotFoundError as error:
            raise NotFound(explain("loading weights", on=str(path), found=error)) from error
        except (SafetensorError, OSError) as error:
            raise Corrupt(
                explain("loading weights", on=str(path), expected="a whole file", found=error)
            ) from error
    if left:
        raise NotFound(
            explain("loading weights", on=str(folder), expected=min(left), found="no such tensor")
        )
