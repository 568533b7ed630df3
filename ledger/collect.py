"""Garbage collection: what nothing refers to any more, and has not for a grace period, is removed.

A segment file is reachable while a location names it. A file that no location names may be one
that a slow writer is about to commit: its time of change, which a writer renews when it finds its
bytes there already, must be older than the grace period. That time is looked at again, and the
locations are, within a write transaction of the catalog, so that no commit comes in between.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.commit import lock_run
from ledger.catalog.queries import list_runs as runs_of
from ledger.errors import Conflict, NotFound, StorageFailed, explain
from ledger.events import CheckpointSaved
from ledger.links import last_told, links_folder
from ledger.placement import StoredRun, list_runs

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["GRACE_S", "CollectReport", "Garbage", "collect", "plan_collection"]

GRACE_S = 24 * 3600.0
"""Longer than any append takes, with its retries."""

_AT_ONCE = 16
"""Files removed in one transaction: writers wait for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Garbage:
    """One thing that nothing refers to."""

    path: str
    """Relative to the ledger."""
    run_id: str | None
    size_bytes: int
    why: str
    """'compacted', 'retired', 'never committed', 'interrupted write', 'interrupted checkpoint',
    'checkpoint that no event names'."""
    modified_ns: int | None
    """Time of change that must still hold when it is removed; None: it was not there."""


@dataclasses.dataclass(frozen=True, slots=True)
class CollectReport:
    """What was removed, or (dry run) would be."""

    garbage: tuple[Garbage, ...]
    waiting: int
    """Files that nothing refers to, but that are younger than the grace period."""
    spared: int
    """Files that were planned, but were in use, or changed, when it came to removing them."""
    dry_run: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(g.size_bytes for g in self.garbage)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "dry_run": self.dry_run,
            "files": len(self.garbage),
            "size_bytes": self.size_bytes,
            "waiting": self.waiting,
            "spared": self.spared,
            "garbage": [
                {"path": g.path, "size_bytes": g.size_bytes, "why": g.why} for g in self.garbage
            ],
        }

    def lines(self) -> list[str]:
        """For a reader."""
        made = [f"{g.path}: {g.size_bytes:,} bytes, {g.why}" for g in self.garbage]
        verb = "would remove" if self.dry_run else "removed"
        rest = f"; {self.waiting} more are within the grace period" if self.waiting else ""
        if self.spared:
            rest += f"; {self.spared} were spared, because they came into use"
        made.append(f"{verb} {len(self.garbage)} things, {self.size_bytes:,} bytes{rest}")
        return made


def plan_collection(
    ledger: Ledger, *, grace_s: float = GRACE_S, checkpoints: bool = False
) -> CollectReport:
    """What could be removed now. Changes nothing.

    `checkpoints=True` takes in checkpoint folders below the ledger's that no event names.

    Raises:
        Conflict: the catalog is behind the links in the store, or names files that are gone while
            there are sealed ones that it does not know: what it does not name may be committed.
    """
    # The files are listed before the catalog is read: what is committed in between is named.
    stored = list_runs(ledger.store)
    before_ns = time.time_ns() - int(grace_s * 1e9)
    with ledger.catalog.read() as connection:
        heads = {r.run_id: r.head_seq for r in runs_of(connection)}
        named = set(connection.execute(sa.select(t.locations.c.path).distinct()).scalars())
        listed = {row.path: row for row in connection.execute(sa.select(t.unreferenced))}
    for run in stored:
        _require_complete(run, heads.get(run.run_id))
        _require_placed(ledger, run, named, listed.keys())
    garbage: list[Garbage] = []
    waiting = 0
    # A run that the catalog does not have is a copy in the making, or one that was never begun.
    there = {path: run.run_id for run in stored for path in run.hot | run.sealed}
    candidates = {path: run_id for path, run_id in there.items() if run_id in heads}
    candidates |= {path: row.run_id for path, row in listed.items()}
    for path in sorted(candidates.keys() - named):
        row = listed.get(path)
        size, modified_ns = (0 if row is None else row.size_bytes), None
        try:
            size, modified_ns, _ = ledger.store.stamp(path)
        except NotFound:
            if row is None:
                continue  # another collection was faster
        if max(modified_ns or 0, 0 if row is None else row.since * 1000) > before_ns:
            waiting += 1
            continue
        why = "never committed" if row is None else row.reason
        garbage.append(Garbage(path, candidates[path], size, why, modified_ns))
    for path in ledger.store.sweep(grace_s, dry_run=True):
        garbage.append(Garbage(path, None, _size_at(ledger, path), "interrupted write", None))
    if ledger.root is not None:
        found, young = _checkpoint_garbage(ledger, ledger.root, before_ns, whole=checkpoints)
        garbage += found
        waiting += young
    return CollectReport(tuple(garbage), waiting, 0, dry_run=True)


def collect(
    ledger: Ledger,
    plan: CollectReport,
    *,
    grace_s: float = GRACE_S,
    progress: Callable[[int, int], None] | None = None,
) -> CollectReport:
    """Remove what was planned, looking at each once more. What is gone already is success.

    Raises: StorageFailed; what was removed before it stays removed, and the rest can be planned
        again.
    """
    removed: list[Garbage] = []
    files = [g for g in plan.garbage if g.run_id is not None]
    for start in range(0, len(files), _AT_ONCE):
        removed += _remove_files(ledger, files[start : start + _AT_ONCE])
        if progress is not None:
            progress(min(start + _AT_ONCE, len(files)), len(files))
    spared = len(files) - len(removed)
    if any(g.why == "interrupted write" for g in plan.garbage):
        swept = set(ledger.store.sweep(grace_s))
        removed += [g for g in plan.garbage if g.why == "interrupted write" and g.path in swept]
    for g in plan.garbage:
        if g.run_id is None and g.why != "interrupted write" and ledger.root is not None:
            _remove_folder(ledger.root / g.path)
            removed.append(g)
    return CollectReport(tuple(removed), plan.waiting, spared, dry_run=False)


def _remove_files(ledger: Ledger, files: Sequence[Garbage]) -> list[Garbage]:
    removed = []
    with ledger.catalog.write() as connection:
        for run_id in sorted({g.run_id for g in files if g.run_id is not None}):
            lock_run(connection, run_id)
        for g in files:
            loc = t.locations.c
            query = sa.select(loc.path).where(loc.path == g.path).limit(1)
            in_use = connection.execute(query).first() is not None
            if in_use or not _unchanged(ledger, g):
                continue
            ledger.store.delete(g.path)
            connection.execute(t.unreferenced.delete().where(t.unreferenced.c.path == g.path))
            removed.append(g)
    return removed


def _unchanged(ledger: Ledger, g: Garbage) -> bool:
    try:
        return ledger.store.stamp(g.path).modified_ns == g.modified_ns
    except NotFound:
        return True


def _require_complete(run: StoredRun, head_seq: int | None) -> None:
    """A catalog put back from an old copy must not have its newer files taken for garbage."""
    if head_seq is None:
        return
    last = max(map(last_told, run.links), default=0)
    if last > head_seq:
        raise Conflict(
            explain(
                "nothing was collected: the catalog is behind the store",
                on=f"run {run.run_id!r}, {links_folder(run.run_id)}",
                expected=f"links up to seq {head_seq}, the catalog's last",
                found=f"links up to seq {last}",
                do="the catalog was put back from an old copy: ledger rebuild-catalog --force",
            )
        )


def _require_placed(
    ledger: Ledger, run: StoredRun, named: Collection[str], listed: Collection[str]
) -> None:
    """A catalog from before a compaction names what is gone, and not where the rows lie now."""
    unknown = sorted(run.sealed.difference(named, listed))
    if not unknown:
        return
    folder = f"runs/{run.run_id}/"
    for path in sorted(path for path in named if path.startswith(folder) and not run.has(path)):
        try:
            ledger.store.stamp(path)  # it may have come after the listing
        except NotFound:
            raise Conflict(
                explain(
                    "nothing was collected: segments are missing, and may lie in a sealed file "
                    "that the catalog does not name",
                    on=f"run {run.run_id!r}, {unknown[0]}",
                    expected=path,
                    found="no such file",
                    do="if the catalog was put back from an old copy: ledger rebuild-catalog "
                    "--force; else bring the file back; see ledger verify",
                )
            ) from None


def _checkpoint_garbage(
    ledger: Ledger, root: Path, before_ns: int, *, whole: bool
) -> tuple[list[Garbage], int]:
    """Folders of interrupted saves, and (`whole`) of checkpoints that no event names."""
    found: list[Garbage] = []
    waiting = 0
    named = _named_checkpoints(ledger, root) if whole else set()
    for folder in _folders(root / "checkpoints"):
        if folder.name.startswith("."):
            why = "interrupted checkpoint"
        elif whole and folder not in named and (folder / "trainer_state.json").is_file():
            why = "checkpoint that no event names"
        else:
            continue
        newest, size = _newest_and_size(folder)
        if newest > before_ns:
            waiting += 1
            continue
        found.append(Garbage(folder.relative_to(root).as_posix(), None, size, why, None))
    return found, waiting


def _folders(base: Path) -> Iterator[Path]:
    """`base`'s folders and theirs: checkpoints of a run, and versions within."""
    if not base.is_dir():
        return
    for folder in sorted(p for p in base.iterdir() if p.is_dir() and not p.is_symlink()):
        yield folder
        if not folder.name.startswith("."):
            yield from sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())


def _named_checkpoints(ledger: Ledger, root: Path) -> set[Path]:
    named: set[Path] = set()
    for run in ledger.runs():
        locations = ledger.reader(run.run_id, None).table(CheckpointSaved.KIND, ["location"])
        named |= {root / location for location in locations["location"].to_pylist()}
    return named


def _newest_and_size(folder: Path) -> tuple[int, int]:
    """Time of the last change in a folder (ns), and its bytes."""
    newest, size = folder.stat().st_mtime_ns, 0
    for path in folder.rglob("*"):
        found = path.lstat()
        newest, size = max(newest, found.st_mtime_ns), size + found.st_size
    return newest, size


def _size_at(ledger: Ledger, path: str) -> int:
    """Of a file that has no name in the store yet; 0 where that cannot be told (an upload)."""
    try:
        return 0 if ledger.root is None else (ledger.root / path).lstat().st_size
    except OSError:
        return 0


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageFailed(
            explain("a folder was not removed", on=str(folder), found=f"{error}")
        ) from error
