"""Run by Alembic: migrates the connection that `migrations` hands over, in its transaction."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=None,
    # Only the schema that tables are made in: another ledger's may come later on the search path.
    version_table_schema=connection.dialect.default_schema_name,
)
context.run_migrations()
