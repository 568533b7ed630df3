"""What is particular to SQLite: how it is set up, what its errors mean, copies of it in memory."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import sqlalchemy as sa
from sqlalchemy import event

from ledger.errors import Corrupt, IncompatibleFormat, LedgerError, StorageFailed, explain

__all__ = [
    "BUSY_TIMEOUT_S",
    "ERRORS",
    "WRITE",
    "configure",
    "file_of",
    "forget_memory",
    "keep_write_ahead_log",
    "meaning",
    "memory_url",
    "sqlite_url",
]

BUSY_TIMEOUT_S = 60
"""How long a process waits for another one's transaction."""

WRITE = "ledger_write"
"""The execution option of connections that write."""

_DAMAGE = (
    "malformed",
    "decode to UTF-8",
    "unsupported file format",
    "no such table",
    "no such column",
)
"""Of messages of SQLite: the file was read, but what stands in it is wrong."""


def sqlite_url(path: Path, *, mode: str | None = None) -> sa.URL:
    """The SQLAlchemy URL of an SQLite file; `mode` 'ro' opens it without writing anything."""
    if mode is None:
        return sa.URL.create("sqlite+pysqlite", database=str(path))
    return sa.URL.create(
        "sqlite+pysqlite",
        database=f"file:{quote(str(path))}",
        query={"mode": mode, "uri": "true"},
    )


def file_of(url: sa.URL) -> Path | None:
    """The file of a database that may be written; None of one in memory, or for reading only."""
    if url.query or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


_in_memory: dict[str, tuple[sa.URL, sqlite3.Connection]] = {}
"""Name → address, and a connection that keeps the database alive."""
_in_memory_lock = threading.Lock()
_numbers = itertools.count()


def memory_url(name: str, *, fresh: bool = False) -> sa.URL:
    """A database in this process's memory that all its connections share, as long as it lives.

    `fresh` begins an empty one under the name; what is open keeps what it has.
    """
    with _in_memory_lock:
        known = _in_memory.get(name)
        if known is not None and not fresh:
            return known[0]
        database = f"file:/ledger-{os.getpid()}-{next(_numbers)}"
        url = sa.URL.create(
            "sqlite+pysqlite", database=database, query={"vfs": "memdb", "uri": "true"}
        )
        keeper = sqlite3.connect(f"{database}?vfs=memdb", uri=True, check_same_thread=False)
        if known is not None:
            known[1].close()
        _in_memory[name] = (url, keeper)
        return url


def forget_memory(name: str) -> None:
    """Let go of a database in memory; what is open keeps what it has."""
    with _in_memory_lock:
        known = _in_memory.pop(name, None)
    if known is not None:
        known[1].close()


def configure(engine: sa.Engine) -> None:
    """Make every connection of `engine` durable, and let transactions begin as we want."""
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    if (path := _path_of(engine.url)) is not None:
        event.listen(engine, "checkout", _StillThere(path))


def _path_of(url: sa.URL) -> Path | None:
    """The file of a database; None where it is in memory."""
    database = url.database or ""
    if url.query.get("vfs") == "memdb" or not database:
        return None
    return Path(unquote(database.removeprefix("file:")) if "uri" in url.query else database)


class _StillThere:
    """Refuses a connection whose file has been removed, or replaced by another one.

    SQLite goes on writing to a file that has no name any more, and says that all is well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: tuple[int, int] | None = None

    def __call__(self, *_: Any) -> None:
        try:
            status = os.stat(self._path)
            found = (status.st_dev, status.st_ino)
        except OSError as error:
            raise _gone(self._path, str(error)) from error
        if self._first is None:
            self._first = found
        elif found != self._first:
            raise _gone(self._path, "another file in its place")


def _gone(path: Path, found: str) -> StorageFailed:
    return StorageFailed(
        explain(
            "the catalog was not used: its file is not the one that was opened",
            on=str(path),
            expected="the same file under the same name",
            found=found,
            do="bring the ledger's folder back, or open the ledger again; nothing was acknowledged",
        )
    )


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
    writes = connection.get_execution_options().get(WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def keep_write_ahead_log(engine: sa.Engine) -> None:
    """Switch the file to WAL, for good. To be done by one process at a time."""
    # The mode can be changed only outside a transaction, which SQLAlchemy always begins.
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("PRAGMA journal_mode = WAL")
    finally:
        raw.close()


def meaning(error: BaseException) -> tuple[type[LedgerError], str, str]:
    """Class of ours for an error of SQLite, what was found, and what to do about it."""
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    text = str(original)
    if "not a database" in text:
        return IncompatibleFormat, text, "see what lies there: it is no catalog of a ledger"
    if isinstance(error, UnicodeDecodeError) or any(sign in text for sign in _DAMAGE):
        return (
            Corrupt,
            text,
            "see what else is damaged: ledger verify; put the catalog back from a copy",
        )
    return (
        StorageFailed,
        text,
        "see that the place is writable, has space and is on a local disk; try again",
    )


ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of the driver that SQLAlchemy lets through as they are."""
