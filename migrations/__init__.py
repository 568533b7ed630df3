"""Versions of the catalog's tables, by Alembic: every one up and down.

`HEAD` is the revision this code works with. SQLAlchemy and Alembic are imported where they are
used: the command line names the revisions without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["HEAD", "REVISIONS", "current", "downgrade", "upgrade"]

REVISIONS = ("0001", "0002")
"""All there ever were, in order."""

HEAD = REVISIONS[-1]


def current(connection: sa.Connection) -> str | None:
    """The revision of the catalog behind `connection`; None where it has no tables of ours."""
    import sqlalchemy as sa

    # On PostgreSQL only the schema in which our tables are made counts, not others on the path.
    schema = connection.dialect.default_schema_name
    if not sa.inspect(connection).has_table("alembic_version", schema=schema):
        return None
    row = connection.execute(sa.text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row[0])


def upgrade(connection: sa.Connection, revision: str = "head") -> None:
    """Raise the tables to `revision`, within the transaction of `connection`."""
    from alembic import command

    command.upgrade(_config(connection), revision)


def downgrade(connection: sa.Connection, revision: str) -> None:
    """Take the tables back to `revision` ('base': none at all), within the transaction."""
    from alembic import command

    command.downgrade(_config(connection), revision)


def _config(connection: sa.Connection):  # type: ignore[no-untyped-def]
    from alembic.config import Config

    config = Config()
    # Alembic reads '%' in paths as interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
