"""Whether the catalog itself is sound, before what its rows say is compared with anything.

SQLite answers many queries from an index alone. So a page of a table may be damaged where queries
give the right answer, and only a check of each index against its table finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from ledger.catalog import integrity_postgres as postgres
from ledger.catalog.engine import Catalog
from ledger.catalog.tables import METADATA
from ledger.errors import Corrupt

__all__ = ["catalog_differences"]

_MOST = 20
"""Rows of wrong type, and lines of SQLite's own check, that are listed."""

_STORED_AS = {sa.BigInteger: "integer", sa.Integer: "integer", sa.LargeBinary: "blob"}


def catalog_differences(catalog: Catalog) -> list[tuple[str, str, str]]:
    """What is wrong with the catalog as a database: (what, expected, found) of each thing.

    The declared tables with their columns, keys and indexes, and whether every row that another one
    refers to is there. Of SQLite also its integrity check (pages, and each index against its table)
    and the type of every value. A catalog that cannot be read for damage is one of the differences.

    Raises:
        StorageFailed: it cannot be read for another reason.
    """
    if catalog.kind == "postgresql":
        checks = [postgres.unsound, postgres.declared, postgres.orphans]
    else:
        checks = [_integrity, _foreign_keys, _declared, _types]
    found: list[tuple[str, str, str]] = []
    try:
        with catalog.read() as connection:
            for check in checks:
                for difference in check(connection):
                    found.append(difference)
                if found and catalog.kind == "postgresql":
                    break  # a table that is missing cannot be asked
    except Corrupt as error:
        said = " ".join(str(error.__cause__ or error).split())
        found.append(("reading it", "a sound database", said))
    return found


def _integrity(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({_MOST})"):
        if line != "ok":
            yield "SQLite's integrity check", "ok", str(line)


def _foreign_keys(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    rows = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    for table, rowid, parent, _ in rows[:_MOST]:
        yield "foreign keys", f"a row in {parent} for {table} rowid {rowid}", "none"


def _declared(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    for table in METADATA.sorted_tables:

        def ask(pragma: str, of: str) -> list[dict[str, Any]]:
            rows = connection.exec_driver_sql(f'PRAGMA {pragma}("{of}")')
            return [dict(row) for row in rows.mappings()]

        key = [c.name for c in table.primary_key.columns]
        columns = {
            c.name: (str(c.type.compile(connection.dialect)), not c.nullable, c.name in key)
            for c in table.columns
        }
        foreign = {
            (key.parent.name, key.column.table.name, key.column.name) for key in table.foreign_keys
        }
        unique = {
            tuple(c.name for c in constraint.columns)
            for constraint in table.constraints
            if isinstance(constraint, sa.UniqueConstraint | sa.PrimaryKeyConstraint)
        }
        plain = {tuple(c.name for c in index.columns) for index in table.indexes}
        stored = {
            "columns": {
                c["name"]: (c["type"], bool(c["notnull"]), bool(c["pk"]))
                for c in ask("table_info", table.name)
            },
            "foreign keys": {
                (f["from"], f["table"], f["to"]) for f in ask("foreign_key_list", table.name)
            },
            "indexes": {
                (bool(i["unique"]), tuple(c["name"] for c in ask("index_info", i["name"])))
                for i in ask("index_list", table.name)
            },
        }
        declared = {
            "columns": columns,
            "foreign keys": foreign,
            "indexes": {(True, u) for u in unique} | {(False, p) for p in plain},
        }
        for what, expected in declared.items():
            if expected != stored[what]:
                yield f"table {table.name}, {what}", str(expected), str(stored[what])


def _types(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    """SQLite lets any value stand in any column; what reads it here does not."""
    for table in METADATA.sorted_tables:
        wanted = {c.name: _STORED_AS.get(type(c.type), "text") for c in table.columns}
        allowed = {
            c.name: (wanted[c.name], "null") if c.nullable else (wanted[c.name],)
            for c in table.columns
        }
        # One statement a table, as text: to put 75 together takes longer than to run them.
        listed = ", ".join(f'typeof("{name}")' for name in wanted)
        wrong = " OR ".join(
            f"""typeof("{name}") NOT IN ({", ".join(f"'{a}'" for a in allowed[name])})"""
            for name in wanted
        )
        query = f'SELECT rowid, {listed} FROM "{table.name}" WHERE {wrong} LIMIT {_MOST}'
        for rowid, *found in connection.exec_driver_sql(query):
            for name, kind in zip(wanted, found, strict=True):
                if kind not in allowed[name]:
                    yield f"table {table.name}, rowid {rowid}, {name}", wanted[name], str(kind)
