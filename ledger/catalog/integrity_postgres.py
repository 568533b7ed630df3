"""Whether a catalog on PostgreSQL is what the migrations made.

PostgreSQL keeps the types of values and checks its own pages; what an administrator, or a restore
that went wrong, can have changed is compared with what is declared.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from ledger.catalog.tables import METADATA

__all__ = ["declared", "orphans", "unsound"]

_MOST = 20

_INVALID = sa.text(
    "SELECT 'index ' || c.relname AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
    " JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = current_schema() AND NOT (i.indisvalid AND i.indisready AND i.indislive)"
    " UNION ALL SELECT 'constraint ' || conname FROM pg_constraint k"
    " JOIN pg_namespace n ON n.oid = k.connamespace"
    " WHERE n.nspname = current_schema() AND NOT k.convalidated"
)


def unsound(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    """Indexes that were not built to the end, constraints that old rows were not checked for."""
    for row in connection.execute(_INVALID):
        yield str(row.name), "valid", "not valid"


def declared(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    """Tables, with their columns, keys and indexes, against what is declared."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names(schema=connection.dialect.default_schema_name))
    for table in METADATA.sorted_tables:
        if table.name not in there:
            yield f"table {table.name}", "a table", "none"
            continue
        wanted = {
            "columns": {
                c.name: (str(c.type.compile(connection.dialect)), bool(c.nullable))
                for c in table.columns
            },
            "primary key": [c.name for c in table.primary_key.columns],
            "foreign keys": {
                (tuple(c.name for c in key.columns), key.referred_table.name)
                for key in table.foreign_key_constraints
            },
            "unique": {
                tuple(c.name for c in constraint.columns)
                for constraint in table.constraints
                if isinstance(constraint, sa.UniqueConstraint)
            },
            "indexes": {tuple(c.name for c in index.columns) for index in table.indexes},
        }
        found = {
            "columns": {
                c["name"]: (str(c["type"].compile(connection.dialect)), bool(c["nullable"]))
                for c in inspector.get_columns(table.name)
            },
            "primary key": inspector.get_pk_constraint(table.name)["constrained_columns"],
            "foreign keys": {
                (tuple(key["constrained_columns"]), key["referred_table"])
                for key in inspector.get_foreign_keys(table.name)
            },
            "unique": {
                tuple(u["column_names"]) for u in inspector.get_unique_constraints(table.name)
            },
            "indexes": {
                tuple(i["column_names"])
                for i in inspector.get_indexes(table.name)
                if not i["unique"]
            },
        }
        for what, expected in wanted.items():
            if expected != found[what]:
                yield f"table {table.name}, {what}", str(expected), str(found[what])


def orphans(connection: sa.Connection) -> Iterator[tuple[str, str, str]]:
    """Rows whose parent is gone: only a session that had the checks off can have made them."""
    for child in METADATA.sorted_tables:
        for key in child.foreign_key_constraints:
            parent = key.referred_table.alias("parent")
            same = [e.parent == parent.c[e.column.name] for e in key.elements]
            query = (
                sa.select(*(e.parent for e in key.elements))
                .select_from(child.outerjoin(parent, sa.and_(*same)))
                .where(parent.c[key.elements[0].column.name].is_(None))
                .where(*(e.parent.is_not(None) for e in key.elements))
                .limit(_MOST)
            )
            for row in connection.execute(query):
                yield (
                    "foreign keys",
                    f"a row in {key.referred_table.name} for {child.name}",
                    str(tuple(row)),
                )
