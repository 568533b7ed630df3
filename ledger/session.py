"""Connections of DuckDB that see the views of a reader and nothing else, kept for more queries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import duckdb

from ledger.errors import InvalidArgument, explain
from ledger.sandbox import forbidden_functions
from ledger.scan import Source, TableSource
from ledger.token_functions import register_token_functions
from ledger.views import Views

if TYPE_CHECKING:
    from ledger.token_text import TokenText

__all__ = ["Session", "SessionPool", "closed_connection", "session"]

_IDLE = 4
"""Connections that a pool keeps: as many threads can ask at once without a new one."""


class Session:
    """One connection; its views show the reader that `source` holds. One query at a time."""

    def __init__(
        self,
        *,
        memory_limit: str | None = None,
        allow_external: bool = False,
        token_text: TokenText | None = None,
    ) -> None:
        self.source = Source()
        self.connection = closed_connection(
            self.source,
            memory_limit=memory_limit,
            allow_external=allow_external,
            token_text=token_text,
        )
        self.views = Views(self.connection, self.source, with_text=token_text is not None)
        self.forbidden = forbidden_functions(self.connection, allow_external=allow_external)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class SessionPool:
    """Idle sessions of one ledger. Threads may share it."""

    def __init__(self) -> None:
        self._idle: list[Session] = []
        self._lock = threading.Lock()

    def take(self) -> Session:
        """A session that nobody uses; a new one where there is none."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Session()

    def give_back(self, used: Session) -> None:
        """Keep a session for the next query."""
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append(used)
                return
        used.close()

    def close(self) -> None:
        """Close what is idle; what comes back later is kept again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()


@contextlib.contextmanager
def session(
    reader: TableSource,
    *,
    memory_limit: str | None = None,
    allow_external: bool = False,
    token_text: TokenText | None = None,
) -> Iterator[Session]:
    """A session on `reader`, for one query after another.

    A reader that has a pool (`sessions`) lends one where nothing particular is asked for. After an
    error the connection is closed: the next query gets a fresh one.
    """
    plain = memory_limit is None and not allow_external and token_text is None
    pool: SessionPool | None = getattr(reader, "sessions", None) if plain else None
    used = (
        Session(memory_limit=memory_limit, allow_external=allow_external, token_text=token_text)
        if pool is None
        else pool.take()
    )
    used.source.reader = reader
    try:
        yield used
    except BaseException:
        used.close()
        raise
    used.source.reader = None
    if pool is None:
        used.close()
    else:
        pool.give_back(used)


def closed_connection(
    source: Source,
    *,
    memory_limit: str | None = None,
    allow_external: bool = False,
    token_text: TokenText | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection in memory without any view yet, closed to everything outside of it.

    Nothing is spilled to disk: a query that needs more than `memory_limit` ("2GB"; by default
    DuckDB's, most of the machine's) fails. Raises InvalidArgument for a limit that is none.
    """
    con = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "allow_persistent_secrets": "false",
            "temp_directory": "",
        },
    )
    try:
        # Without this, a name in a query could pick up any variable of the caller.
        con.execute("SET python_enable_replacements = false")
        if memory_limit is not None:
            _limit_memory(con, memory_limit)
        register_token_functions(con, token_text, source.fail)
        if not allow_external:
            con.execute("SET enable_external_access = false")
        con.execute("SET lock_configuration = true")
    except BaseException:
        con.close()
        raise
    return con


def _limit_memory(con: duckdb.DuckDBPyConnection, memory_limit: str) -> None:
    try:
        con.execute("SET memory_limit = $1", [memory_limit])
    except duckdb.Error as error:
        raise InvalidArgument(
            explain(
                "limiting the memory of queries",
                on=memory_limit,
                expected="a size such as 500MB or 2GB",
                found=str(error).strip(),
            )
        ) from error
