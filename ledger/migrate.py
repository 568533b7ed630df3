"""Raising a ledger's catalog to this version, or taking it back to an older one, in place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

import migrations
from ledger.catalog import postgres, queries
from ledger.catalog import tables as t
from ledger.catalog.copies import copy_to_file
from ledger.catalog.engine import Catalog
from ledger.errors import Conflict, IncompatibleFormat, InvalidArgument, explain
from ledger.links import put_epoch, put_run
from ledger.mark import Mark, write_mark
from ledger.place import (
    FORMAT,
    Place,
    locked,
    not_writable,
    require_format,
    require_mark,
    require_same,
    require_there,
)
from ledger.segment import HOT_FORMAT
from ledger.segment_reader import SegmentReader
from ledger.storage import ObjectStore

__all__ = ["Migrated", "migrate_catalog", "note_runs"]

_KINDS_0001 = frozenset(
    [
        "branch_forked",
        "checkpoint_saved",
        "eval_scored",
        "observation_appended",
        "prompt_issued",
        "routing_recorded",
        "run_resumed",
        "run_started",
        "sample_decided",
        "sample_scored",
        "segment_generated",
        "signal_recorded",
        "step_committed",
        "weights_published",
    ]
)
_COUNTERS_0001 = {
    "index": ("index", "indices"),
    "group_index": ("group_index",),
    "rollout_id": ("rollout_id", "rollout_ids"),
    "weight_version": ("weight_version",),
}
"""Name of a counter of revision 0001 → columns that use its numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Migrated:
    """What was done, or (dry run) would have been."""

    catalog: str
    before: str
    after: str
    backup: Path | None
    """A copy of the catalog as it was; None where nothing changed, or the server keeps copies."""
    dry_run: bool


class _DryRunError(Exception):
    """Undoes a transaction that worked."""


def migrate_catalog(
    place: Place,
    *,
    to: str = migrations.HEAD,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Migrated:
    """Change the catalog's tables to revision `to` in one transaction: wholly, or not at all.

    An SQLite file is copied first, beside itself (`catalog.sqlite.before-0002`), durably. Of
    several processes that migrate at once one does it; the others find it done. Processes that have
    the ledger open should be stopped: they work with tables that change under them.

    `progress(done, total)` is called while events are read, on the way back. `dry_run` does all of
    it, and undoes it.

    Raises:
        InvalidArgument: no such revision; SQLite on a network file system.
        IncompatibleFormat: not a ledger, or of a newer or unknown version.
        Conflict: the ledger holds what the older version cannot read. Nothing was changed.
        StorageFailed: the place cannot be written.
        NotFound: there is no ledger.
    """
    if to not in migrations.REVISIONS:
        raise InvalidArgument(
            explain(
                "a catalog was not migrated",
                on="--to",
                expected=f"one of {', '.join(migrations.REVISIONS)}",
                found=to,
            )
        )
    mark = require_mark(place)
    require_there(place, mark)
    reason = None if place.file is None else not_writable(place.file)
    if reason is not None:
        raise reason
    with locked(place):
        catalog = Catalog(place.url)
        try:
            return _migrate(place, catalog, mark, to, dry_run, progress)
        finally:
            catalog.close()


def _migrate(
    place: Place,
    catalog: Catalog,
    mark: Mark | None,
    to: str,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> Migrated:
    backup: Path | None = None

    def work(connection: sa.Connection) -> tuple[str, str]:
        nonlocal backup
        if catalog.kind == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(postgres.LOCK)))
        ledger_id, before = require_format(connection, catalog.name)
        require_same(place, mark, ledger_id)
        if before not in migrations.REVISIONS:
            raise IncompatibleFormat(
                explain(
                    "a catalog was not migrated: its version is not known",
                    on=catalog.name,
                    expected=f"one of {', '.join(migrations.REVISIONS)}",
                    found=before,
                )
            )
        if before == to:
            return ledger_id, before
        if place.file is not None and not dry_run:
            # Writers are kept out by this very transaction, so the copy is what is migrated.
            backup = _free_name(place.file, to)
            copy_to_file(place.file, backup)
        if before < to:
            if not dry_run:
                note_runs(connection, place.store, ledger_id)
            migrations.upgrade(connection, to)
        else:
            counters = _back_to_0001(connection, place.store, progress)
            migrations.downgrade(connection, to)
            if counters:
                connection.execute(
                    sa.table("counters", *map(sa.column, counters[0])).insert(), counters
                )
        if dry_run:
            raise _DryRunError(before)
        return ledger_id, before

    try:
        ledger_id, before = catalog.transact(work)
    except _DryRunError as undone:
        return Migrated(catalog.name, str(undone), to, None, dry_run=True)
    if mark is None and to != "0001" and not dry_run:
        write_mark(place.store, Mark(FORMAT, ledger_id, catalog.kind))
    return Migrated(catalog.name, before, to, backup, dry_run)


def _free_name(file: Path, to: str) -> Path:
    name = file.with_name(f"{file.name}.before-{to}")
    return name.with_name(f"{name.name}-{time.time_ns() // 1000}") if name.exists() else name


def note_runs(connection: sa.Connection, store: ObjectStore, ledger_id: str) -> None:
    """Write beside the data what later versions write when a run or an epoch begins."""
    for run in queries.list_runs(connection):
        put_run(store, ledger_id, run.run_id, run.created_at)
    for row in connection.execute(sa.select(t.producers)):
        put_epoch(store, ledger_id, row.run_id, row.producer, row.epoch)


def _back_to_0001(
    connection: sa.Connection, store: ObjectStore, progress: Callable[[int, int], None] | None
) -> list[dict[str, Any]]:
    """The rows of `counters`, which follow from the events.

    Raises:
        Conflict: there is something that revision 0001 has no place or reader for.
    """
    found: list[dict[str, Any]] = []
    reader = SegmentReader(store)
    runs = queries.list_runs(connection)
    segments = {run.run_id: queries.segments_after(connection, run.run_id, 0) for run in runs}
    done, total = 0, sum(map(len, segments.values()))
    for run_id, stored in segments.items():
        following: dict[str, int] = {}
        for s in stored:
            unknown = s.kind not in _KINDS_0001 or s.layout != 1
            if s.file is None or s.file.format != HOT_FORMAT or s.file.row_offset or unknown:
                raise Conflict(
                    explain(
                        "a catalog was not migrated: the older version cannot read all events",
                        on=f"run {run_id!r}, {s.kind} at seq {s.first_seq}",
                        expected="segments of layout 1, each in a hot file of its own",
                        found=f"layout {s.layout}, "
                        + ("rows that are no longer kept" if s.file is None else s.file.path),
                        do="stay with this version",
                    )
                )
            table = reader.open(s.file, s.kind, s.layout)
            for name, largest in _used(table).items():
                following[name] = max(following.get(name, 0), largest + 1)
            done += 1
            if progress is not None:
                progress(done, total)
        found += [{"run_id": run_id, "name": n, "next": v} for n, v in sorted(following.items())]
    return found


def _used(table: pa.Table) -> dict[str, int]:
    """Counter → the largest of its numbers that a table uses."""
    found: dict[str, int] = {}
    for counter, columns in _COUNTERS_0001.items():
        for name in columns:
            if name not in table.column_names:
                continue
            values = table.column(name)
            if pa.types.is_list(values.type):
                values = pc.list_flatten(values)
            largest = pc.max(values).as_py()
            if largest is not None:
                found[counter] = max(largest, found.get(counter, largest))
    return found
