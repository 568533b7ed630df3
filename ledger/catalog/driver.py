"""Statements of a commit: compiled once and, on SQLite, run without SQLAlchemy in between.

There a commit takes some statements of a few microseconds each, and SQLAlchemy needs ten times as
long to hand one over. Over a network that does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

__all__ = ["Driver", "RawDriver", "Statement"]


class Statement:
    """A statement whose only parameters are named ones of plain types."""

    def __init__(self, construct: Any) -> None:
        self.construct = construct
        self._compiled: dict[str, tuple[str, tuple[str, ...]]] = {}

    def text(self, dialect: sa.Dialect) -> tuple[str, tuple[str, ...]]:
        """Its text, and the order of its parameters, in a dialect that gives them no names."""
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = self.construct.compile(dialect=dialect)
            found = self._compiled[dialect.name] = (str(compiled), tuple(compiled.positiontup))
        return found


class Driver:
    """Runs statements in an open transaction, through SQLAlchemy."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def run(self, statement: Statement, values: Mapping[str, Any]) -> None:
        """Execute it once."""
        self._connection.execute(statement.construct, values)

    def first(self, statement: Statement, values: Mapping[str, Any]) -> Any:
        """The first row of its result, or None."""
        return self._connection.execute(statement.construct, values).first()

    def many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute it for each of `rows`."""
        if rows:
            self._connection.execute(statement.construct, rows)


class RawDriver(Driver):
    """On the driver's own cursor. Errors are its own: Catalog translates them."""

    def __init__(self, dialect: sa.Dialect, cursor: Any) -> None:
        self._dialect = dialect
        self._cursor = cursor

    def run(self, statement: Statement, values: Mapping[str, Any]) -> None:
        """See Driver."""
        text, order = statement.text(self._dialect)
        self._cursor.execute(text, [values[name] for name in order])

    def first(self, statement: Statement, values: Mapping[str, Any]) -> Any:
        """See Driver."""
        self.run(statement, values)
        return self._cursor.fetchone()

    def many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        """See Driver."""
        if rows:
            text, order = statement.text(self._dialect)
            self._cursor.executemany(text, [[row[name] for name in order] for row in rows])
