"""Keeping for years: tombstones, files that await collection, exported links.

Counters and numbers given out go: numbers belong to their branch and follow from the events. On the
way back their tables return empty; `ledger migrate` fills the counters from the events.

Revision: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tombstones",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("first_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id", "first_seq"], ["segments.run_id", "segments.first_seq"]),
    )
    op.create_table(
        "unreferenced",
        sa.Column("path", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("since", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.create_table(
        "exports",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.drop_table("allocations")
    op.drop_table("counters")


def downgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("next", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.create_table(
        "allocations",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    for table in ("exports", "unreferenced", "tombstones"):
        op.drop_table(table)
