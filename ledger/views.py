"""Registers the events and the views over them in a DuckDB connection.

Events are registered under their stable names as datasets (`scan`): nothing is opened before a
query asks for it. The views on top are defined in `view_definitions`.
"""

from __future__ import annotations

import re

import duckdb

import ledger.events  # noqa: F401 — fills EVENTS
from ledger.errors import InvalidArgument, explain
from ledger.fields import EVENTS
from ledger.mismatch import MISMATCH_SCHEMA, mismatch_table
from ledger.scan import ComputedScan, EventScan, Source, TableSource
from ledger.view_definitions import VIEWS, ViewColumn, event_columns

__all__ = ["TableSource", "Views", "describe_view", "register_views", "view_names"]

_COMPUTED = {"_mismatch": (MISMATCH_SCHEMA, mismatch_table)}
"""Building blocks that no SQL computes fast enough."""

_WORD = re.compile(r"\w+")
_METADATA = re.compile(r"\b(show|information_schema|pragma\w*|duckdb_\w+|sqlite_\w+)\b", re.I)


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


class Views:
    """Defines events and views in a connection, each when it is first needed."""

    def __init__(
        self, con: duckdb.DuckDBPyConnection, source: Source, *, with_text: bool = False
    ) -> None:
        """`with_text` adds a column `text` to views of tokens; token_text must be defined."""
        self._con = con
        self._source = source
        self._with_text = with_text
        self._done: set[str] = set()

    def define_all(self) -> None:
        """Define every event and view."""
        for name in (*VIEWS, *EVENTS):
            self._define(name)

    def define_for(self, sql: str) -> None:
        """Define what a query may touch: the names that occur in it, and what those need.

        A query that asks for metadata may touch all.
        """
        if _METADATA.search(sql):
            self.define_all()
            return
        words = {word.lower() for word in _WORD.findall(sql)}
        for name in (*VIEWS, *EVENTS):
            if name in words:
                self._define(name)

    def _define(self, name: str) -> None:
        if name in self._done:
            return
        if name in EVENTS:
            self._con.register(name, EventScan(self._source, name))
        elif name in _COMPUTED:
            self._con.register(name, ComputedScan(self._source, *_COMPUTED[name]))
        else:
            view = VIEWS[name]
            for used in view.uses:
                self._define(used)
            sql = view.sql
            if self._with_text and view.per_token:
                sql = f"SELECT t.*, token_text(t.token) AS text FROM ({sql}) AS t"
            self._con.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {sql}")
        self._done.add(name)


def register_views(con: duckdb.DuckDBPyConnection, reader: TableSource) -> None:
    """Make every event and view of `reader` queryable in `con`; nothing is opened yet.

    A query then opens what it touches, and raises what `reader.table` raises, as DuckDB's error
    with the text of ours.
    """
    Views(con, Source(reader)).define_all()
