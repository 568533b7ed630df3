"""Opening the catalog: SQLite in WAL mode, every commit synced before it is acknowledged.

Everything above is written for any dialect of SQLAlchemy; what is particular to SQLite stands here.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from ledger.errors import Corrupt, IncompatibleFormat, StorageFailed, explain

__all__ = ["BUSY_TIMEOUT_S", "Catalog", "sqlite_url"]

BUSY_TIMEOUT_S = 60
"""How long a process waits for another one's transaction."""

_WRITE = "ledger_write"

_DAMAGE = (
    "malformed",
    "decode to UTF-8",
    "unsupported file format",
    "no such table",
    "no such column",
)
"""Of messages of SQLite: the file was read, but what stands in it is wrong."""


def sqlite_url(path: Path) -> sa.URL:
    """The SQLAlchemy URL of an SQLite file."""
    return sa.URL.create("sqlite+pysqlite", database=str(path))


class Catalog:
    """A connection pool that gives out read and write transactions, in our errors."""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        self.engine = sa.create_engine(url)
        self._writing = self.engine.execution_options(**{_WRITE: True})
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _configure)
            event.listen(self.engine, "begin", _begin)

    @property
    def name(self) -> str:
        """Where it is, without any password."""
        return self.url.render_as_string(hide_password=True)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one state of the catalog."""
        with _translated("the catalog was not read", self.name), self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that is durable when the block has ended, and gone if it raised."""
        with (
            _translated("the catalog did not take a commit", self.name),
            self._writing.begin() as connection,
        ):
            yield connection

    def keep_write_ahead_log(self) -> None:
        """Switch an SQLite file to WAL, for good. To be done by one process at a time."""
        if self.engine.dialect.name != "sqlite":
            return
        with _translated("the catalog was not set up", self.name):
            # The mode can be changed only outside a transaction, which SQLAlchemy always begins.
            raw = self.engine.raw_connection()
            try:
                raw.cursor().execute("PRAGMA journal_mode = WAL")
            finally:
                raw.close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _configure(connection: Any, _record: Any) -> None:
    # The driver must not begin transactions by itself: _begin does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")
    # FULL syncs the log in every commit: what was acknowledged survives a power cut.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    # IMMEDIATE takes the writers' lock first: a transaction that reads and then writes cannot be
    # overtaken in between, nor fail when it starts to write.
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def _translated(tried: str, on: str) -> Iterator[None]:
    try:
        yield
    except (sa.exc.DatabaseError, sqlite3.DatabaseError, UnicodeDecodeError) as error:
        text = str(error.orig if isinstance(error, sa.exc.DatabaseError) else error)
        if "not a database" in text:
            raise IncompatibleFormat(
                explain(tried, on=on, expected="a catalog", found=text)
            ) from error
        if isinstance(error, UnicodeDecodeError) or any(sign in text for sign in _DAMAGE):
            raise Corrupt(
                explain(
                    tried,
                    on=on,
                    expected="a sound database",
                    found=text,
                    do="see what else is damaged: ledger verify; put the catalog back from a copy",
                )
            ) from error
        raise StorageFailed(
            explain(
                tried,
                on=on,
                found=text,
                do="see that the place is writable, has space and is on a local disk; try again",
            )
        ) from error
