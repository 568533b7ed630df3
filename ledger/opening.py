"""Opening a ledger: its store, its catalog, and whether the two belong together."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import migrations
from ledger.catalog import postgres
from ledger.catalog.address import shown
from ledger.catalog.copies import copy_to_memory, rows_to_memory
from ledger.catalog.engine import Catalog
from ledger.catalog.mounts import network_filesystem
from ledger.catalog.sqlite import meaning, sqlite_url
from ledger.copied import note_if_new, settle, was_copied
from ledger.errors import (
    IncompatibleFormat,
    InvalidArgument,
    LedgerError,
    StorageFailed,
    explain,
)
from ledger.place import (
    Place,
    not_writable,
    place_of,
    require_format,
    require_mark,
    require_same,
    require_there,
)
from ledger.place import create as create_place
from ledger.storage import open_store
from ledger.store import Ledger

__all__ = ["open_ledger"]


def open_ledger(
    uri: str | Path,
    *,
    create: bool = False,
    catalog: str | None = None,
    read_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Ledger:
    """Open the ledger at `uri`; with `create`, make it first where there is none.

    `uri` is a folder (a path or file://), s3://BUCKET/PREFIX, or memory://NAME, which lasts as long
    as the process. `catalog` is the address of its catalog (default: LEDGER_CATALOG; else
    catalog.sqlite in the folder). `storage_options` go to the store.

    `read_only` refuses every write, and writes nothing by itself. What cannot be written opens for
    reading all the same, and every write is refused with the reason: a place without write
    permission, SQLite on a network file system, a catalog of an older version (see `ledger
    migrate`). Of these the first two may be read from a copy in memory, which shows the state at
    the time of opening, and the last one always is.

    Processes may open, and create, one ledger at the same time. A forked child must open its own.

    Raises:
        NotFound: there is none, and `create` is False.
        IncompatibleFormat: the place holds something else, a ledger of a newer version, or store
            and catalog are of two ledgers.
        StorageFailed: the place cannot be read; with `create`: or written.
        Corrupt: the catalog is damaged so that it cannot be read.
        InvalidArgument: a kind of place or catalog that is not supported or was not said.
        MissingDependency: the driver of the store or the catalog is not installed.
    """
    if create and read_only:
        raise InvalidArgument(
            explain("a ledger was not opened", expected="create or read_only", found="both")
        )
    store = open_store(uri, storage_options)
    try:
        place = place_of(store, catalog)
        mark = require_mark(place)
        if create:
            place = create_place(place)
            mark = require_mark(place)
        else:
            require_there(place, mark)
        refusal: LedgerError | None = None
        if read_only:
            refusal = InvalidArgument(
                explain("nothing was written: the ledger was opened for reading only", on=store.uri)
            )
        copied = place.file is not None and not place.named and was_copied(place.file)
        if copied and refusal is not None and place.file is not None:
            # Whoever writes nothing must not take the log away either, as others do at the end.
            url = sqlite_url(place.file, mode="ro")
            opened = Catalog(url, refusal=refusal, name=shown(place.url))
        elif place.file is not None:
            opened = _open_file(place, refusal)
        else:
            opened = Catalog(place.url, refusal=refusal)
        try:
            if copied:
                opened = settle(place, opened)
            with opened.read() as connection:
                ledger_id, revision = require_format(connection, opened.name)
                if opened.kind == "postgresql" and not read_only:
                    postgres.require_durable(connection, opened.name)
            require_same(place, mark, ledger_id)
            if revision != migrations.HEAD:
                opened = _upgraded(place, opened, revision)
            elif place.file and not place.named and opened.refusal is None:
                note_if_new(place.file)
        except BaseException:
            opened.close()
            raise
    except BaseException:
        store.close()
        raise
    return Ledger(store, opened, ledger_id, read_only=opened.refusal is not None)


def _open_file(place: Place, refusal: LedgerError | None) -> Catalog:
    """An SQLite file: itself where it can be written, else itself for reading, else a copy."""
    path = place.file
    if path is None:
        raise ValueError("not an SQLite file")
    reason = not_writable(path)
    if reason is None:
        return Catalog(place.url, refusal=refusal)
    refusal = refusal or reason
    if network_filesystem(path) is None:
        # SQLite can follow another process's writes without writing, where its files are there.
        live = Catalog(sqlite_url(path, mode="ro"), refusal=refusal, name=shown(place.url))
        try:
            with live.read() as connection:
                require_format(connection, live.name)
            return live
        except StorageFailed:
            live.close()
        except BaseException:
            live.close()
            raise
    try:
        url, let_go = copy_to_memory(path)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        kind, found, do = meaning(error)
        raise kind(
            explain("the catalog was not read", on=shown(place.url), found=found, do=do)
        ) from error
    return Catalog(url, refusal=refusal, name=shown(place.url), on_close=let_go)


def _upgraded(place: Place, opened: Catalog, revision: str) -> Catalog:
    """A copy in memory of a catalog of an older version, raised to ours; `opened` is closed.

    Raises:
        IncompatibleFormat: the version is not known.
    """
    if revision not in migrations.REVISIONS:
        raise IncompatibleFormat(
            explain(
                "this ledger's catalog is of a version that is not known",
                on=opened.name,
                expected=f"catalog {' or '.join(migrations.REVISIONS)}",
                found=f"catalog {revision}",
            )
        )
    refusal = IncompatibleFormat(
        explain(
            "nothing was written: this ledger's catalog is of an older version",
            on=opened.name,
            expected=f"catalog {migrations.HEAD}",
            found=f"catalog {revision}",
            do="raise it: ledger migrate",
        )
    )
    with opened.read() as connection:
        url, let_go = rows_to_memory(connection, revision)
    made = Catalog(url, name=opened.name, on_close=let_go)
    try:
        made.transact(migrations.upgrade)
    except BaseException:
        made.close()
        raise
    opened.close()
    made.refusal = refusal
    return made
