"""Putting a catalog that was made again in the place of the lost one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

import migrations
from ledger.catalog import tables as t
from ledger.catalog.address import kind_of
from ledger.catalog.engine import Catalog, sqlite_url
from ledger.catalog.integrity import catalog_differences
from ledger.copied import note_place
from ledger.errors import AlreadyExists, Conflict, LedgerError, NotFound, StorageFailed, explain
from ledger.mark import Mark, write_mark
from ledger.place import FORMAT, Place, require_mark
from ledger.rebuild import RebuildReport, fill, read_store

__all__ = ["rebuild_catalog"]


def rebuild_catalog(
    place: Place,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RebuildReport:
    """Make the catalog of a place again from what its store tells. Stop writers first.

    An SQLite file is made beside the old one, which is then moved aside (`….old-<time>`), whatever
    is left of it. In another database the tables are made, or emptied, and filled in one
    transaction.

    Raises:
        NotFound: the store has no run, and nothing says which ledger it is.
        AlreadyExists: the catalog is sound and has runs, and `force` is False.
        Conflict: links have a hole or contradict the chain, so that later ones would be left out,
            and `force` is False. With it they are moved to `links-set-aside`.
        StorageFailed: the store or the catalog did not take it. The old catalog is as it was.
    """
    store = place.store
    mark = require_mark(place)
    report = read_store(store, None if mark is None else mark.ledger_id, progress)
    if report.ledger_id is None:
        raise NotFound(
            explain(
                "a catalog was not made again: the store tells of no run",
                on=store.uri,
                expected="objects runs/<run>/run.json",
                do="to begin a new ledger: ledger init",
            )
        )
    if not force:
        _require_unsound(place)
    if report.beyond and not (force or dry_run):
        raise Conflict(
            explain(
                "a catalog was not made again: some commits would be left out",
                on=store.uri,
                expected="links without a hole, that agree with the chain",
                found="; ".join(str(f).replace("\n", ",") for f in report.findings[:3]),
                do="bring the missing objects back from a copy; or leave the later commits out for "
                "good with --force (see --dry-run)",
            )
        )
    if dry_run:
        return report
    if place.file is not None:
        _replace_file(place.file, report)
        note_place(place.file)
    else:
        _replace_rows(place.url, report)
    if mark is None:
        write_mark(store, Mark(FORMAT, report.ledger_id, kind_of(place.url)))
    for path in report.beyond:
        aside = path.replace("/links/", "/links-set-aside/", 1)
        store.put([(aside, store.read(path))])
        store.delete(path)
    return report


def _require_unsound(place: Place) -> None:
    """Raise AlreadyExists where there is a catalog that works and has runs."""
    if place.file is not None and not place.file.exists():
        return
    catalog = Catalog(place.url)
    try:
        with catalog.read() as connection:
            if migrations.current(connection) is None:
                return
            runs = connection.execute(sa.select(sa.func.count()).select_from(t.runs)).scalar()
        if not runs or catalog_differences(catalog):
            return
        name = catalog.name
    except StorageFailed:
        raise  # it may be sound, and only out of reach
    except LedgerError:
        return  # damaged
    finally:
        catalog.close()
    raise AlreadyExists(
        explain(
            "a catalog was not made again: it is sound",
            on=name,
            expected="none, or a damaged one",
            found=f"{runs} runs",
            do="check it against the files: ledger verify; replace it anyway: --force",
        )
    )


def _fill_new(catalog: Catalog, report: RebuildReport) -> None:
    catalog.keep_write_ahead_log()
    with catalog.write() as connection:
        migrations.upgrade(connection)
        _fill(connection, report)


def _fill(connection: sa.Connection, report: RebuildReport) -> None:
    fill(connection, report)
    connection.execute(
        t.meta.insert(),
        [
            {"key": "format", "value": str(FORMAT)},
            {"key": "ledger_id", "value": report.ledger_id},
        ],
    )


def _replace_file(path: Path, report: RebuildReport) -> None:
    new = path.with_name(f"{path.name}.rebuilding")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for rest in ("", "-wal", "-shm"):
            Path(f"{new}{rest}").unlink(missing_ok=True)
        catalog = Catalog(sqlite_url(new))
        try:
            _fill_new(catalog, report)
        finally:
            catalog.close()  # the last connection writes the log into the file
            Path(f"{new}-turns").unlink(missing_ok=True)
        aside = f"{path}.old-{time.time_ns() // 1000}"
        # The log first: one that stayed would be read as the new file's.
        for rest in ("-wal", "-shm", ""):
            old = Path(f"{path}{rest}")
            if old.exists():
                os.rename(old, f"{aside}{rest}")
        os.rename(new, path)
        for synced in (path, path.parent):
            descriptor = os.open(synced, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        if isinstance(error, LedgerError):
            raise
        raise StorageFailed(
            explain(
                "a catalog was not made again",
                on=str(path),
                found=f"{type(error).__name__}: {error}",
            )
        ) from error


def _replace_rows(url: sa.URL, report: RebuildReport) -> None:
    catalog = Catalog(url)

    def replace(connection: sa.Connection) -> None:
        if migrations.current(connection) is None:
            migrations.upgrade(connection)
        for table in reversed(t.METADATA.sorted_tables):
            connection.execute(table.delete())
        _fill(connection, report)

    try:
        catalog.transact(replace)
    finally:
        catalog.close()
