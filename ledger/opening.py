"""Opening a ledger: its store, its catalog, and whether the two belong together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import migrations
from ledger.catalog import postgres
from ledger.catalog.engine import Catalog
from ledger.errors import IncompatibleFormat, InvalidArgument, explain
from ledger.place import (
    Place,
    place_of,
    require_format,
    require_mark,
    require_same,
    require_there,
)
from ledger.place import (
    create as create_place,
)
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
    catalog.sqlite in the folder). `storage_options` go to the store. `read_only` refuses every
    write, and writes nothing by itself.

    Processes may open, and create, one ledger at the same time. A forked child must open its own.

    Raises:
        NotFound: there is none, and `create` is False.
        IncompatibleFormat: the place holds something else, a ledger of another version, or store
            and catalog are of two ledgers.
        StorageFailed: the place cannot be read or written.
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
        opened = _open_catalog(place, read_only=read_only)
        try:
            with opened.read() as connection:
                ledger_id, revision = require_format(connection, opened.name)
                if opened.kind == "postgresql" and not read_only:
                    postgres.require_durable(connection, opened.name)
            require_same(place, mark, ledger_id)
            if revision != migrations.HEAD:
                raise IncompatibleFormat(
                    explain(
                        "this ledger's catalog is of an older version",
                        on=opened.name,
                        expected=f"catalog {migrations.HEAD}",
                        found=f"catalog {revision}",
                        do="raise it: ledger migrate",
                    )
                )
        except BaseException:
            opened.close()
            raise
    except BaseException:
        store.close()
        raise
    return Ledger(store, opened, ledger_id, read_only=read_only)


def _open_catalog(place: Place, *, read_only: bool) -> Catalog:
    refusal = None
    if read_only:
        refusal = InvalidArgument(
            explain(
                "nothing was written: the ledger was opened for reading only", on=place.store.uri
            )
        )
    return Catalog(place.url, refusal=refusal)
