"""Private copies of a catalog, in this process's memory or beside it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

import migrations
from ledger.catalog.sqlite import forget_memory, memory_url
from ledger.errors import StorageFailed, explain

__all__ = ["copy_to_file", "copy_to_memory", "new_memory", "rows_to_memory"]

_TRIES = 20
_ROWS = 1000


def copy_to_memory(path: Path) -> tuple[sa.URL, Callable[[], None]]:
    """A copy in memory of an SQLite file with its log, as they lie; and what lets go of it.

    No lock is taken and nothing is written there: file and log are copied again and again until
    neither has changed meanwhile.

    Raises:
        StorageFailed: they changed all the time, or cannot be read.
        sqlite3.Error: what was read is no sound database.
    """
    name = f"copy {secrets.token_hex(8)}"
    url = memory_url(name)
    try:
        with _as_it_lies(path) as copied:
            connection = sqlite3.connect(copied)
            try:
                # Takes the log into the file: memory has no place for one.
                connection.execute("PRAGMA journal_mode = DELETE")
            finally:
                connection.close()
            _backup(copied, f"{url.database}?vfs=memdb")
    except BaseException:
        forget_memory(name)
        raise
    return url, lambda: forget_memory(name)


def copy_to_file(source: Path | sa.URL, target: Path) -> None:
    """A copy of an SQLite database, durable on return, under a name that is new."""
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        if isinstance(source, Path):
            _backup(source, f"file:{quote(str(temporary))}")
        else:
            _backup(f"{source.database}?vfs=memdb", f"file:{quote(str(temporary))}")
        os.link(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    for synced in (target, target.parent):
        descriptor = os.open(synced, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _backup(path: Path | str, target: str) -> None:
    source = sqlite3.connect(path, timeout=60, uri=isinstance(path, str))
    try:
        destination = sqlite3.connect(target, uri=True)
        try:
            source.backup(destination)
        finally:
            destination.close()
    finally:
        source.close()


@contextlib.contextmanager
def _as_it_lies(path: Path) -> Iterator[Path]:
    log = path.with_name(path.name + "-wal")
    with tempfile.TemporaryDirectory(prefix="ledger-catalog-") as folder:
        copied = Path(folder) / path.name
        for _ in range(_TRIES):
            try:
                before = _stamps(path, log)
                shutil.copyfile(path, copied)
                copied_log = copied.with_name(log.name)
                copied_log.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(log, copied_log)
                same = before == _stamps(path, log)
            except OSError as error:
                raise StorageFailed(
                    explain(
                        "the catalog was not read",
                        on=str(path),
                        found=str(error),
                        do="see that this user may read it, and that its disk has no faults",
                    )
                ) from error
            if same:
                yield copied
                return
    raise StorageFailed(
        explain(
            "the catalog was not read: it changes faster than it can be copied",
            on=str(path),
            do="open it where it can be written, or try again when less is appended",
        )
    )


def _stamps(*paths: Path) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            state = os.stat(path)
            found.append((state.st_size, state.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return found


def new_memory() -> tuple[sa.URL, Callable[[], None]]:
    """An empty database in memory; and what lets go of it."""
    name = f"new {secrets.token_hex(8)}"
    return memory_url(name), lambda: forget_memory(name)


def rows_to_memory(connection: sa.Connection, revision: str) -> tuple[sa.URL, Callable[[], None]]:
    """A copy in memory of a catalog of any kind, at its own revision; and what lets go of it."""
    name = f"copy {secrets.token_hex(8)}"
    url = memory_url(name)
    engine = sa.create_engine(url)
    try:
        with engine.begin() as copy:
            migrations.upgrade(copy, revision)
            tables = sa.MetaData()
            tables.reflect(copy)
            for table in tables.sorted_tables:
                if table.name == "alembic_version":
                    continue
                rows = connection.execute(sa.select(table)).mappings()
                for chunk in rows.partitions(_ROWS):
                    copy.execute(table.insert(), [dict(row) for row in chunk])
    except BaseException:
        forget_memory(name)
        raise
    finally:
        engine.dispose()
    return url, lambda: forget_memory(name)
