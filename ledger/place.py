"""Where a ledger is: a store for bytes and a catalog, which belong together; and making one.

The catalog of a ledger in a local folder lies there too, unless one was named. `ledger.json` says
which kind it is, and holds the id that the catalog must have as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

import migrations
from ledger.catalog import postgres
from ledger.catalog import tables as t
from ledger.catalog.address import KINDS, catalog_url, kind_of, shown
from ledger.catalog.engine import Catalog
from ledger.catalog.mounts import OVERRIDE, network_filesystem
from ledger.catalog.sqlite import memory_url, sqlite_url
from ledger.errors import (
    Corrupt,
    IncompatibleFormat,
    InvalidArgument,
    LedgerError,
    NotFound,
    StorageFailed,
    explain,
)
from ledger.mark import MARK, Mark, read_mark, write_mark
from ledger.storage import ObjectStore
from ledger.storage.probe import PROBES, require_exclusive_create

__all__ = [
    "CATALOG",
    "FORMAT",
    "Place",
    "create",
    "locked",
    "not_writable",
    "place_of",
    "require_format",
    "require_mark",
]

FORMAT = 1
"""Version of the stored format as a whole."""

CATALOG = "catalog.sqlite"
"""Name of the catalog in a ledger's own folder."""

ENVIRONMENT = "LEDGER_CATALOG"

_in_memory = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A store and the address of a catalog."""

    store: ObjectStore
    url: sa.URL
    named: bool
    """Whether somebody named the catalog; else it is where a ledger of this store has its own."""

    @property
    def in_memory(self) -> bool:
        """Whether the catalog lasts as long as this process only."""
        return "vfs" in self.url.query

    @property
    def file(self) -> Path | None:
        """The catalog's file, where it is one."""
        if kind_of(self.url) != "sqlite" or self.in_memory:
            return None
        return Path(str(self.url.database))


def place_of(store: ObjectStore, catalog: str | None) -> Place:
    """Where the ledger in `store` has its catalog, or where `catalog` or LEDGER_CATALOG says.

    Raises:
        InvalidArgument: no catalog was named for a store that has none of its own, or what was
            named is no address of one.
    """
    catalog = catalog or os.environ.get(ENVIRONMENT) or None
    own = None if store.root is None else sqlite_url(store.root / CATALOG)
    if catalog is not None:
        url = catalog_url(catalog)
        return Place(store, url, named=url != own)
    if own is not None:
        return Place(store, own, named=False)
    if store.uri.startswith("memory://"):
        return Place(store, memory_url(store.uri), named=False)
    mark = read_mark(store)
    ways = KINDS if mark is None or mark.catalog not in KINDS else [mark.catalog]
    raise InvalidArgument(
        explain(
            "a ledger was not opened: where its catalog is was not said",
            on=store.uri,
            expected=" or ".join(f"--catalog {KINDS[way]}" for way in ways)
            + f" (or {ENVIRONMENT})",
            found="none, and there is no place for one beside the objects",
        )
    )


def require_mark(place: Place) -> Mark | None:
    """The mark of the ledger in a place; None where there is none yet, or it never got one.

    Raises:
        IncompatibleFormat: a newer version made it.
        InvalidArgument: it needs a catalog of another kind.
    """
    mark = read_mark(place.store)
    if mark is None:
        return None
    if mark.format > FORMAT:
        raise IncompatibleFormat(
            explain(
                "this ledger was written by a newer version",
                on=place.store.uri,
                expected=f"format {FORMAT} or older",
                found=f"format {mark.format}",
                do="upgrade this package",
            )
        )
    if mark.catalog != kind_of(place.url):
        raise InvalidArgument(
            explain(
                "a ledger was not opened: it has a catalog of another kind",
                on=place.store.uri,
                expected=f"--catalog {KINDS.get(mark.catalog, mark.catalog)} (or {ENVIRONMENT})",
                found=shown(place.url) if place.named else "no --catalog",
            )
        )
    return mark


def require_there(place: Place, mark: Mark | None) -> None:
    """Refuse a place that has no ledger, as far as that can be told without opening a catalog.

    Raises:
        NotFound: there is none.
        IncompatibleFormat: the folder holds something else, or a ledger with another catalog.
    """
    store, file = place.store, place.file
    if mark is None and place.named:
        own = None if store.root is None else store.root / CATALOG
        if own is not None and own.exists():
            raise IncompatibleFormat(
                explain(
                    "a ledger was not opened: it has a catalog of its own",
                    on=store.uri,
                    expected="no --catalog",
                    found=shown(place.url),
                )
            )
        raise _no_ledger(place)
    if place.in_memory and mark is None:
        raise _no_ledger(place)
    if file is None or file.exists():
        return
    if mark is not None:
        raise _catalog_gone(place)
    there = _objects(store)
    if not there:
        raise _no_ledger(place)
    if any(path.startswith("runs/") for path in there):
        raise _catalog_gone(place)
    raise IncompatibleFormat(
        explain(
            "this folder is not a ledger",
            on=store.uri,
            expected=f"a file {MARK}, or {CATALOG}",
            found=there,
            do="name the folder of a ledger; a new one is made in an empty folder: ledger init",
        )
    )


def not_writable(path: Path) -> LedgerError | None:
    """Why an SQLite catalog at `path` must not be written; None where it may be."""
    kind = network_filesystem(path)
    if kind is not None:
        return InvalidArgument(
            explain(
                "nothing was written: SQLite's locks and memory maps do not hold on a network file "
                "system, and two writers would destroy the catalog",
                on=str(path),
                expected="a local disk",
                found=f"a file system of kind {kind}",
                do="keep the catalog in PostgreSQL (--catalog postgresql+psycopg://…), or on a "
                "disk of the only host that writes (--catalog sqlite:////local/catalog.sqlite); "
                f"{OVERRIDE}=1 if the place is of one host alone and its locks are known to hold",
            )
        )
    folder = path.parent
    for place in (path, folder) if path.exists() else ():
        if not os.access(place, os.W_OK):
            return StorageFailed(
                explain(
                    "nothing was written: the catalog cannot be written",
                    on=str(path),
                    expected="permission to write it and its folder",
                    found=f"{place} is read-only to this process",
                )
            )
    return None


def _no_ledger(place: Place) -> NotFound:
    at = str(place.store.root or place.store.uri)
    also = " --catalog …" if place.named else ""
    do = f"make one: ledger init {at}{also}"
    if place.store.root is None and at.startswith("memory://"):
        do = "make one in this process, with create=True: it ends with the process that made it"
    return NotFound(explain("there is no ledger", on=at, do=do))


def _catalog_gone(place: Place) -> NotFound:
    return NotFound(
        explain(
            "a ledger was not opened: its catalog is not where it was looked for",
            on=place.store.uri,
            expected=shown(place.url),
            found="no such file" if place.file is not None else "a database without its tables",
            do="name the place: --catalog …; if it is lost, make it again from the files: "
            "ledger rebuild-catalog",
        )
    )


def _objects(store: ObjectStore) -> list[str]:
    """Some of the objects of a store, but the catalog's files and what only tried the store out."""
    found: list[str] = []
    for path in store.list(""):
        if not path.startswith(("catalog.", PROBES + "/")):
            found.append(path)
        if len(found) == 10:
            break
    return found


def create(place: Place) -> Place:
    """Make a ledger where there is none; several processes may do so at once. Gives its place.

    First the mark, then the tables: whoever is killed in between has made a ledger that the next
    one completes.

    Raises:
        IncompatibleFormat: store or catalog hold something else.
        NotFound: the ledger is there but its catalog is gone.
        StorageFailed: the place cannot be written.
    """
    on = place.store.uri
    try:
        if place.store.root is not None:
            place.store.root.mkdir(parents=True, exist_ok=True)
        if place.file is not None:
            reason = not_writable(place.file)
            if reason is not None:
                raise reason
            _require_free(place)
            place.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(place):
            if place.in_memory:
                # What a forgotten store of this name had is no part of a new one; and somebody else
                # may have begun that since this place was looked up.
                fresh = read_mark(place.store) is None
                place = dataclasses.replace(place, url=memory_url(place.store.uri, fresh=fresh))
            catalog = Catalog(place.url)
            try:
                _create(place, catalog)
            finally:
                catalog.close()
            return place
    except OSError as error:
        if isinstance(error, LedgerError):
            raise
        raise StorageFailed(
            explain(
                "a ledger was not made",
                on=on,
                expected="a folder that is there or can be made, and can be written",
                found=f"{type(error).__name__}: {error}",
                do="name another place, or make this one writable",
            )
        ) from error


def _require_free(place: Place) -> Mark | None:
    """The mark; where there is none: neither anything else, unless it is an unmarked ledger."""
    mark = require_mark(place)
    if mark is not None:
        return mark
    file = place.file
    if not place.named and file is not None and file.exists():
        return None
    there = _objects(place.store)
    if not there:
        return None
    mark = require_mark(place)  # somebody else may have made it in this moment
    if mark is not None:
        return mark
    if any(path.startswith("runs/") for path in there):
        require_there(place, None)
    raise IncompatibleFormat(
        explain(
            "a ledger was not made: the place holds something else",
            on=place.store.uri,
            expected="an empty or new folder",
            found=there,
        )
    )


def _create(place: Place, catalog: Catalog) -> None:
    mark = _require_free(place)
    catalog.keep_write_ahead_log()
    with catalog.read() as connection:
        if catalog.kind == "postgresql":
            postgres.require_schema(connection, catalog.name)
        known = _known_id(connection, catalog.name)
    if known is None and mark is not None and next(iter(place.store.list("runs")), None):
        raise _catalog_gone(place)
    if known is not None and mark is None and place.named:
        raise _other_ledger(place, "no ledger", known)
    if mark is None:
        if place.store.root is None:
            require_exclusive_create(place.store)
        made = Mark(FORMAT, known or secrets.token_hex(16), catalog.kind)
        mark = write_mark(place.store, made)
    require_same(place, mark, catalog.transact(lambda c: _fill(c, catalog, mark)))


def _known_id(connection: sa.Connection, name: str) -> str | None:
    """The id of the ledger whose tables a catalog has; None where it has no tables at all."""
    if migrations.current(connection) is not None:
        found = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == "ledger_id"))
        return str(found.scalar() or "")
    tables = sa.inspect(connection).get_table_names(schema=connection.dialect.default_schema_name)
    if tables:
        raise IncompatibleFormat(
            explain(
                "a ledger was not made: its catalog is another program's",
                on=name,
                expected="no tables, or a ledger's",
                found=tables[:10],
            )
        )
    return None


def _fill(connection: sa.Connection, catalog: Catalog, mark: Mark) -> str:
    """Make the tables where they are missing; gives the id that they have."""
    if catalog.kind == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(postgres.LOCK)))
    known = _known_id(connection, catalog.name)
    if known is not None:
        return known
    migrations.upgrade(connection)
    connection.execute(
        t.meta.insert(),
        [
            {"key": "format", "value": str(FORMAT)},
            {"key": "ledger_id", "value": mark.ledger_id},
        ],
    )
    return mark.ledger_id


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Alone with an SQLite file, whose mode is set outside of any transaction."""
    if place.in_memory:
        with _in_memory:
            yield
        return
    if place.file is None:
        yield
        return
    path = place.file.with_suffix(".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def require_same(place: Place, mark: Mark | None, ledger_id: str) -> None:
    """Refuse a store and a catalog of two ledgers. Raises: IncompatibleFormat."""
    if mark is not None and mark.ledger_id != ledger_id:
        raise _other_ledger(place, f"ledger {mark.ledger_id}", ledger_id)


def _other_ledger(place: Place, store_has: str, catalog_has: str) -> IncompatibleFormat:
    return IncompatibleFormat(
        explain(
            "a ledger was not opened: store and catalog do not belong together",
            on=place.store.uri,
            expected=f"a catalog of {store_has}, which is in the store",
            found=f"{shown(place.url)} of ledger {catalog_has}",
            do="name the ledger's own catalog with --catalog; give each ledger a database or a "
            "schema of its own",
        )
    )


def require_format(connection: sa.Connection, name: str) -> tuple[str, str]:
    """(ledger's id, catalog's revision), if it is one that this code can work with or upgrade.

    Raises:
        NotFound: it has no tables at all.
        IncompatibleFormat: it is not a ledger's, or one of a newer or unknown version.
        Corrupt: it does not say which.
    """
    revision = migrations.current(connection)
    if revision is None:
        raise IncompatibleFormat(
            explain(
                "this is not a ledger",
                on=name,
                expected="a ledger's tables",
                found="none",
                do="make one: ledger init",
            )
        )
    meta = {row.key: row.value for row in connection.execute(sa.select(t.meta))}
    written = meta.get("format")
    if (
        written is None
        or not written.isascii()
        or not written.isdecimal()
        or "ledger_id" not in meta
    ):
        raise Corrupt(
            explain(
                "the catalog does not say what it is",
                on=name,
                expected="in its table meta a number as 'format', and a 'ledger_id'",
                found=meta,
                do="put the catalog back from a copy",
            )
        )
    stored = int(written)
    if stored > FORMAT or revision > migrations.HEAD:
        raise IncompatibleFormat(
            explain(
                "this ledger was written by a newer version",
                on=name,
                expected=f"format {FORMAT}, catalog {migrations.HEAD}, or older",
                found=f"format {stored}, catalog {revision}",
                do="upgrade this package",
            )
        )
    return str(meta["ledger_id"]), revision
