"""Making a ledger, and telling whether a folder holds one that this code works with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

import migrations
from ledger.catalog import tables as t
from ledger.catalog.engine import Catalog, sqlite_url
from ledger.errors import Corrupt, IncompatibleFormat, InvalidArgument, StorageFailed, explain

__all__ = ["CATALOG", "FORMAT", "create", "local_root", "require_format"]

FORMAT = 1
"""Version of the stored format as a whole."""

CATALOG = "catalog.sqlite"
_LOCK = "catalog.lock"


def local_root(uri: str | Path) -> Path:
    """The folder that a path or a file:// URI names. Raises: InvalidArgument."""
    if isinstance(uri, Path):
        return uri.absolute()
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).absolute()
    if parts.scheme and "://" in uri:
        raise InvalidArgument(
            explain(
                "a ledger was not opened: this kind of place is not supported",
                on=parts.scheme + "://",
                expected="a folder, or file://…",
            )
        )
    return Path(uri).absolute()


def create(root: Path) -> None:
    """Make the tables where they are missing; several processes may do so at once.

    Raises:
        IncompatibleFormat: the folder holds something else.
        StorageFailed: the place cannot be written.
    """
    path = root / CATALOG
    try:
        root.mkdir(parents=True, exist_ok=True)
        foreign = sorted(
            p.name for p in root.iterdir() if not p.name.startswith(("catalog.", "runs"))
        )
        if foreign and not path.exists():
            raise IncompatibleFormat(
                explain(
                    "a ledger was not made: the folder holds something else",
                    on=str(root),
                    expected="an empty or new folder",
                    found=foreign[:10],
                )
            )
        with _locked(root / _LOCK):
            catalog = Catalog(sqlite_url(path))
            try:
                _fill(catalog)
            finally:
                catalog.close()
    except OSError as error:
        if isinstance(error, StorageFailed):
            raise
        raise StorageFailed(
            explain("a ledger was not made", on=str(root), found=f"{type(error).__name__}: {error}")
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fill(catalog: Catalog) -> None:
    catalog.keep_write_ahead_log()
    with catalog.write() as connection:
        if migrations.current(connection) is not None:
            return
        tables = sa.inspect(connection).get_table_names()
        if tables:
            raise IncompatibleFormat(
                explain(
                    "a ledger was not made: its catalog is another program's",
                    on=catalog.name,
                    expected="no tables, or a ledger's",
                    found=tables[:10],
                )
            )
        migrations.upgrade(connection)
        connection.execute(
            t.meta.insert(),
            [
                {"key": "format", "value": str(FORMAT)},
                {"key": "ledger_id", "value": secrets.token_hex(16)},
            ],
        )


def require_format(connection: sa.Connection, name: str) -> str:
    """The ledger's id, if its catalog is one that this code works with.

    Raises:
        IncompatibleFormat: it is not a ledger's, or one of another version.
        Corrupt: it does not say which.
    """
    revision = migrations.current(connection)
    if revision is None:
        raise IncompatibleFormat(
            explain("this is not a ledger", on=name, expected="a ledger's tables", found="none")
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
    if revision != migrations.HEAD:
        raise IncompatibleFormat(
            explain(
                "this ledger's catalog is of an older version",
                on=name,
                expected=f"catalog {migrations.HEAD}",
                found=f"catalog {revision}",
                do="raise it: ledger migrate",
            )
        )
    return str(meta["ledger_id"])
