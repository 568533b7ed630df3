"""The first catalog: runs, branches, commits, segments and their locations, derived rows.

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_RANGES = ("rollout_step", "step", "group_index", "index")


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("head_seq", sa.BigInteger, nullable=False),
        sa.Column("head_chain", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "branches",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("parent", sa.String),
        sa.Column("fork_seq", sa.BigInteger),
        sa.Column("fork_version", sa.BigInteger),
        sa.Column("seq", sa.BigInteger),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.create_table(
        "producers",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("producer", sa.String, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.create_table(
        "commits",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("first_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("branch", sa.String, nullable=False),
        sa.Column("producer", sa.String, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("producer_seq", sa.BigInteger, nullable=False),
        sa.Column("content_hash", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("committed_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("run_id", "producer", "epoch", "producer_seq", name="uq_commits_key"),
        sa.ForeignKeyConstraint(["run_id", "branch"], ["branches.run_id", "branches.name"]),
    )
    op.create_table(
        "segments",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("first_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("layout", sa.Integer, nullable=False),
        sa.Column("branch", sa.String, nullable=False),
        sa.Column("commit_seq", sa.BigInteger, nullable=False),
        sa.Column("logical_hash", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        *(sa.Column(f"{end}_{name}", sa.BigInteger) for name in _RANGES for end in ("min", "max")),
        sa.ForeignKeyConstraint(["run_id", "commit_seq"], ["commits.run_id", "commits.first_seq"]),
    )
    op.create_table(
        "locations",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("first_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("path", sa.String, nullable=False),
        sa.Column("format", sa.String, nullable=False),
        sa.Column("row_offset", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("file_hash", sa.LargeBinary, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id", "first_seq"], ["segments.run_id", "segments.first_seq"]),
    )
    op.create_index("ix_locations_path", "locations", ["path"])
    op.create_table(
        "versions",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("weight_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("parent_version", sa.BigInteger),
        sa.Column("branch", sa.String, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
    op.create_table(
        "consumption",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("branch", sa.String, primary_key=True),
        sa.Column("sample_index", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    )
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


def downgrade() -> None:
    for table in (
        "allocations",
        "counters",
        "consumption",
        "versions",
        "locations",
        "segments",
        "commits",
        "producers",
        "branches",
        "runs",
        "meta",
    ):
        op.drop_table(table)
