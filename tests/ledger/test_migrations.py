"""The migrations make exactly the tables that the catalog declares, and take them away again."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import migrations
from ledger.catalog.engine import Catalog, sqlite_url
from ledger.catalog.tables import METADATA


def test_up_makes_what_is_declared_and_down_takes_it_away(tmp_path: Path) -> None:
    catalog = Catalog(sqlite_url(tmp_path / "odd %name.sqlite"))
    with catalog.write() as connection:
        assert migrations.current(connection) is None
        migrations.upgrade(connection)
        assert migrations.current(connection) == migrations.HEAD
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
        inspector = sa.inspect(connection)
        for table in METADATA.sorted_tables:
            found = inspector.get_columns(table.name)
            assert [c["name"] for c in found] == [c.name for c in table.columns]
            assert [c["nullable"] for c in found] == [c.nullable for c in table.columns]
            key = inspector.get_pk_constraint(table.name)["constrained_columns"]
            assert key == [c.name for c in table.primary_key.columns]
            assert len(inspector.get_foreign_keys(table.name)) == len(table.foreign_key_constraints)
    with catalog.write() as connection:
        migrations.upgrade(connection)
        migrations.downgrade(connection, "base")
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
        migrations.upgrade(connection)
    catalog.close()


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    catalog = Catalog(sqlite_url(tmp_path / "x.sqlite"))
    try:
        with catalog.write() as connection:
            migrations.upgrade(connection)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with catalog.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
    catalog.close()


def test_head_is_the_last_revision() -> None:
    folder = Path(migrations.__file__).parent
    assert ScriptDirectory(str(folder)).get_current_head() == migrations.HEAD


def test_every_table_compiles_for_postgresql() -> None:
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateTable

    for table in METADATA.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
