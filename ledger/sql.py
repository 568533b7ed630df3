"""Runs a question in SQL over a reader's views, and nothing else.

A query sees the ledger's views. It cannot reach files, the network, extensions, settings, Python
objects or memory addresses, cannot change anything, and ends when its time or memory is used up.
With `allow_external` it may read files as well: what it gives up is that a query of another person
can then read whatever this process can; it still changes nothing and loads no extension.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from ledger.errors import InvalidArgument, explain
from ledger.sandbox import refuse_changes, shortened
from ledger.scan import Source, TableSource
from ledger.session import Session, closed_connection, session
from ledger.sql_errors import translation
from ledger.views import Views

if TYPE_CHECKING:
    from ledger.token_text import TokenText

__all__ = ["ask", "connect", "run_query"]

Parameters = Sequence[Any] | Mapping[str, Any] | None
_INTERRUPT_INTERVAL_S = 0.05


def connect(reader: TableSource) -> duckdb.DuckDBPyConnection:
    """A connection in memory with the reader's views, closed to files, network and extensions.

    The caller closes it. It is DuckDB's own: it runs any statement, also those that `run_query`
    refuses; they reach nothing but the connection itself. Errors are DuckDB's.
    """
    source = Source(reader)
    con = closed_connection(source)
    try:
        Views(con, source).define_all()
    except BaseException:
        con.close()
        raise
    return con


def run_query(
    reader: TableSource,
    sql: str,
    params: Parameters = None,
    *,
    timeout_s: float | None = None,
    memory_limit: str | None = None,
    allow_external: bool = False,
    token_text: TokenText | None = None,
) -> pa.Table:
    """The result of one reading statement over the views of `reader`, as an Arrow table.

    `params` fill `?`, `$1` (a sequence) or `$name` (a mapping). `timeout_s` bounds the seconds that
    the statement runs; `memory_limit` bounds its memory ("2GB"): nothing is spilled to disk.
    `allow_external` lets it read files, too; see the module. `token_text` gives tokens their text.

    Raises InvalidArgument where the statement is refused, does not compile (the message has
    DuckDB's own), or used up its time or memory. Raises what the reader raises
    where stored bytes are not what was committed.
    """
    with session(
        reader, memory_limit=memory_limit, allow_external=allow_external, token_text=token_text
    ) as used:
        return ask(used, sql, params, timeout_s=timeout_s)


def ask(
    used: Session, sql: str, params: Parameters = None, *, timeout_s: float | None = None
) -> pa.Table:
    """The result of one statement in a session: see `run_query`."""
    con = used.connection
    with _translated(sql, used.source):
        refuse_changes(con, sql, used.forbidden)
        used.views.define_for(sql)
        with _interrupted(con, sql, timeout_s):
            relation = con.sql(sql, params=_bound(params))
            if relation is None:
                raise InvalidArgument(
                    explain("running a query", on=shortened(sql), found="no result")
                )
            return _with_integers(relation.to_arrow_table(), [str(t) for t in relation.types])


def _with_integers(table: pa.Table, types: Sequence[str]) -> pa.Table:
    """Columns of HUGEINT, which is what DuckDB's sums of integers are, as int64 where they fit.

    Arrow has no such type, and DuckDB hands out decimals, which are no numbers in JSON, pandas and
    torch.
    """
    for at, kind in enumerate(types):
        if kind == "HUGEINT":
            try:
                whole = table.column(at).cast(pa.int64())
            except pa.ArrowInvalid:
                continue  # beyond 64 bits: the decimal says it
            table = table.set_column(at, table.field(at).name, whole)
    return table


def _bound(params: Parameters) -> Any:
    if params is None:
        return None
    return dict(params) if isinstance(params, Mapping) else list(params)


@contextmanager
def _translated(sql: str, source: Source) -> Iterator[None]:
    """Turn DuckDB's exceptions into ours; what a scan raised comes out as it was."""
    source.failure = None
    try:
        yield
    except duckdb.Error as error:
        if source.failure is not None:
            raise source.failure from error
        raise translation(sql, error) from error


@contextmanager
def _interrupted(
    con: duckdb.DuckDBPyConnection, sql: str, timeout_s: float | None
) -> Iterator[None]:
    """Interrupt the connection when the time is over."""
    if timeout_s is None:
        yield
        return
    if not timeout_s > 0:  # NaN too
        raise InvalidArgument(
            explain("running a query", on="timeout_s", expected="above 0", found=timeout_s)
        )
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
                on=shortened(sql),
                expected=f"an answer within {timeout_s:g} s",
                found="the time is over",
                do="raise --timeout, or ask for fewer rows",
            )
        ) from error
    finally:
        done.set()
        watcher.join()
