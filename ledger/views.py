"""Registers the events and the views over them in a DuckDB connection.

Event tables are registered as Arrow tables under their stable names: DuckDB reads the mapped files
without a copy. The views on top are defined in `view_definitions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import duckdb
import pyarrow as pa

import ledger.events  # noqa: F401 — fills EVENTS
from ledger.errors import InvalidArgument, explain
from ledger.fields import EVENTS
from ledger.view_definitions import PLACE, VIEWS, ViewColumn, event_columns

__all__ = ["TableSource", "describe_view", "register_views", "view_names"]


class TableSource(Protocol):
    """What views are built from: a ledger reader, or tables in memory."""

    def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All visible events of `kind`: its columns and run_id, branch, seq. May be empty."""
        ...  # pragma: no cover


def view_names() -> tuple[str, ...]:
    """The views for users, then the events, each in a fixed order."""
    return (*(name for name, view in VIEWS.items() if view.public), *sorted(EVENTS))


def describe_view(name: str) -> tuple[str, tuple[ViewColumn, ...]]:
    """What a view or event holds, and the meaning of each of its columns.

    Raises InvalidArgument where there is no such view.
    """
    if name in EVENTS:
        return (EVENTS[name].__doc__ or "").strip(), event_columns(name)
    if name in VIEWS and VIEWS[name].public:
        return VIEWS[name].doc, VIEWS[name].columns
    raise InvalidArgument(
        explain(
            "describing a view",
            on=name,
            expected="one of " + ", ".join(view_names()),
            found=f"no view {name!r}",
            do="`ledger views` lists them",
        )
    )


def register_views(
    con: duckdb.DuckDBPyConnection, reader: TableSource, only: Iterable[str] | None = None
) -> None:
    """Make every event and view of `reader` queryable in `con`.

    `only` names the views (or events) that will be asked; what they need is registered too. It
    saves opening files that a query does not touch: routing is most of a ledger's bytes. The
    connection keeps the Arrow tables alive. Raises what `reader.table` raises; calling again
    replaces what was registered.
    """
    done: set[str] = set()

    def register(name: str) -> None:
        if name in done:
            return
        done.add(name)
        if name in EVENTS:
            con.register(name, _placed(reader.table(name)))
            return
        view = VIEWS[name]
        for used in view.uses:
            register(used)
        con.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {view.sql}")

    for name in (*VIEWS, *EVENTS) if only is None else only:
        register(name)


def _placed(table: pa.Table) -> pa.Table:
    """The same columns with run_id, branch and seq first, each once.

    Where an event has a column of its own with such a name, the place is what the reader added.
    """
    last = {name: i for i, name in enumerate(table.column_names)}
    own = [i for name, i in last.items() if name not in PLACE]
    return table.select([last[name] for name in PLACE] + own)
