"""Runs a question in SQL over a reader's views, and nothing else.

A query sees the ledger's views. It cannot reach files, the network, extensions, settings, Python
objects or memory addresses, cannot change anything, and ends when its time or memory is used up.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from ledger.errors import InvalidArgument, explain
from ledger.views import TableSource, register_views, view_names

__all__ = ["connect", "run_query", "views_in"]

_READS = frozenset({"SELECT", "EXPLAIN", "MULTI"})
"""Statement types that only read. DESCRIBE, SHOW, SUMMARIZE, VALUES, FROM and PIVOT … IN are
SELECT to DuckDB; PIVOT without IN is MULTI in 2.0 and CREATE (of an enum of its own) in 1.5."""

# Table functions that read memory at an address, run text as SQL (past the check of its names), or
# change the process: no setting of DuckDB turns them off.
_REFUSED = re.compile(
    r"\b(arrow_scan|arrow_scan_dumb|python_arrow_scan|pandas_scan|python_map_function|query"
    r"|query_table|enable_logging|disable_logging|enable_profiling|disable_profiling"
    r"|set_log\w*|truncate_duckdb_logs|force_checkpoint|checkpoint|seq_scan|from_substrait\w*"
    r"|get_substrait\w*)\"?\s*\(",
    re.IGNORECASE,
)
_INTERRUPT_INTERVAL_S = 0.05
_WORD = re.compile(r"\w+")
_METADATA = re.compile(r"\b(show|information_schema|pragma\w*|duckdb_\w+|sqlite_\w+)\b", re.I)
_EXPLAIN = re.compile(r"\s*explain\b(\s+analyze\b)?(\s*\([^)]*\))?", re.IGNORECASE)


def connect(
    reader: TableSource,
    views: Sequence[str] | None = None,
    *,
    memory_limit: str | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection in memory with the reader's views, closed to everything else.

    `views` names those that will be asked; None registers all. The caller closes it. Nothing is
    spilled to disk: a query that needs more than `memory_limit` ("2GB"; by default DuckDB's, most
    of the machine's) fails. Raises InvalidArgument for a limit that is none, and what
    `reader.table` raises.
    """
    con = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "temp_directory": "",
        },
    )
    try:
        # Without this, a name in a query could pick up any variable of the caller.
        con.execute("SET python_enable_replacements = false")
        if memory_limit is not None:
            _limit_memory(con, memory_limit)
        register_views(con, reader, views)
        con.execute("SET enable_external_access = false")
        con.execute("SET lock_configuration = true")
    except BaseException:
        con.close()
        raise
    return con


def run_query(
    reader: TableSource,
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    memory_limit: str | None = None,
) -> pa.Table:
    """The result of one reading statement over the views of `reader`, as an Arrow table.

    `params` fill `?`, `$1` (a sequence) or `$name` (a mapping). `timeout_s` bounds the seconds that
    the statement runs; `memory_limit` bounds its memory ("2GB"): nothing is spilled to disk.

    Raises InvalidArgument where the statement is refused, does not compile (the message has
    DuckDB's own and names the views), or used up its time or memory. Raises what the reader raises
    where stored bytes are not what was committed.
    """
    with connect(reader, views_in(sql), memory_limit=memory_limit) as con:
        with _translated(sql):
            _refuse_changes(con, sql)
        with _translated(sql), _interrupted(con, sql, timeout_s):
            relation = con.sql(sql, params=_bound(params))
            if relation is None:
                raise _refusal(sql, "a statement without a result")
            return relation.to_arrow_table()


def views_in(sql: str) -> list[str] | None:
    """The views that a query may touch: those whose name occurs in it. None: all of them."""
    if _METADATA.search(sql):
        return None
    words = {word.lower() for word in _WORD.findall(sql)}
    return [name for name in view_names() if name in words]


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


def _bound(params: Sequence[Any] | Mapping[str, Any] | None) -> Any:
    if params is None:
        return None
    return dict(params) if isinstance(params, Mapping) else list(params)


def _refuse_changes(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise InvalidArgument unless `sql` is one statement that only reads."""
    statements = con.extract_statements(sql)
    kinds = [_kind(statement) for statement in statements]
    if kinds == ["CREATE", "SELECT"] and ";" not in sql.strip().rstrip(";"):
        kinds = ["SELECT"]  # DuckDB 1.5 takes PIVOT apart like this
    if len(kinds) != 1:
        raise _refusal(sql, f"{len(kinds)} statements")
    if kinds[0] not in _READS:
        raise _refusal(sql, f"a statement of type {kinds[0]}")
    if kinds[0] == "EXPLAIN":
        inner = _EXPLAIN.sub("", sql, count=1)
        if any(_kind(s) != "SELECT" for s in con.extract_statements(inner)):
            raise _refusal(sql, "EXPLAIN of a statement that changes something")
    refused = _REFUSED.search(sql)
    if refused is not None:
        raise _refusal(sql, f"the function {refused.group(1)}")


def _kind(statement: Any) -> str:
    return str(statement.type).rpartition(".")[2]


def _refusal(sql: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "running a query",
            on=_shortened(sql),
            expected="one statement that only reads: SELECT, WITH, FROM, VALUES, DESCRIBE, "
            "SUMMARIZE, EXPLAIN, SHOW or PIVOT",
            found=found,
            do="ask the views; events are only ever appended, by a writer",
        )
    )


@contextmanager
def _translated(sql: str) -> Iterator[None]:
    """Turn DuckDB's exceptions into ours."""
    try:
        yield
    except duckdb.InterruptException:
        raise  # its own message, where the time is watched
    except duckdb.OutOfMemoryException as error:
        raise InvalidArgument(
            explain(
                "running a query",
                on=_shortened(sql),
                expected="a query that fits the memory limit",
                found=str(error).strip(),
                do="raise --memory-limit, or ask for fewer rows or columns",
            )
        ) from error
    except duckdb.Error as error:
        raise InvalidArgument(
            explain(
                "running a query",
                on=_shortened(sql),
                expected="SQL over the views " + ", ".join(view_names()),
                found=str(error).strip(),
                do="`ledger views NAME` describes the columns of a view",
            )
        ) from error


@contextmanager
def _interrupted(
    con: duckdb.DuckDBPyConnection, sql: str, timeout_s: float | None
) -> Iterator[None]:
    """Interrupt the connection when the time is over."""
    if timeout_s is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        # An interrupt between two statements is lost: repeat it until the work has ended.
        over = done.wait(timeout_s)
        while not over:
            con.interrupt()
            over = done.wait(_INTERRUPT_INTERVAL_S)

    watcher = threading.Thread(target=watch, name="query-timeout", daemon=True)
    watcher.start()
    try:
        yield
    except duckdb.InterruptException as error:
        raise InvalidArgument(
            explain(
                "running a query",
                on=_shortened(sql),
                expected=f"an answer within {timeout_s:g} s",
                found="the time is over",
                do="raise --timeout, or ask for fewer rows",
            )
        ) from error
    finally:
        done.set()
        watcher.join()


def _shortened(sql: str) -> str:
    text = " ".join(sql.split())
    return text if len(text) <= 200 else text[:200] + " …"
