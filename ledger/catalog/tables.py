"""The tables of the catalog. The migrations make them; a test compares the two.

A segment is known by (run_id, first_seq): events are numbered per run from 1, without gaps, and a
segment of N rows takes the numbers first_seq to first_seq + N − 1. What was committed never
changes; where it lies (`locations`) may.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

__all__ = [
    "METADATA",
    "RANGES",
    "branches",
    "commits",
    "consumption",
    "exports",
    "locations",
    "meta",
    "producers",
    "runs",
    "segments",
    "tombstones",
    "unreferenced",
    "versions",
]

METADATA = MetaData()

RANGES = ("rollout_step", "step", "group_index", "index")
"""Columns whose smallest and largest value is kept with each segment, so that reads can skip it."""

meta = Table(
    "meta",
    METADATA,
    Column("key", String, primary_key=True),  # 'format', 'ledger_id'
    Column("value", String, nullable=False),
)

runs = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("created_at", BigInteger, nullable=False),  # microseconds since 1970-01-01 UTC
    Column(
        "head_seq", BigInteger, nullable=False
    ),  # number of the last event; 0 where there is none
    Column("head_chain", LargeBinary, nullable=False),  # link of the last segment
)

branches = Table(
    "branches",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("parent", String),  # NULL for the run's first
    Column("fork_seq", BigInteger),  # ancestors' events are seen up to this one
    Column("fork_version", BigInteger),
    Column("seq", BigInteger),  # the branch_forked event; NULL for the run's first
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

producers = Table(
    "producers",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("producer", String, primary_key=True),
    Column("epoch", BigInteger, nullable=False),  # the newest: older ones are fenced off
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

commits = Table(
    "commits",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("branch", String, nullable=False),
    Column("producer", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("producer_seq", BigInteger, nullable=False),
    Column("content_hash", LargeBinary, nullable=False),  # of what was appended, times left out
    Column("chain", LargeBinary, nullable=False),  # link of the commit's last segment
    Column("committed_at", BigInteger, nullable=False),  # microseconds since 1970-01-01 UTC
    UniqueConstraint("run_id", "producer", "epoch", "producer_seq", name="uq_commits_key"),
    ForeignKeyConstraint(["run_id", "branch"], ["branches.run_id", "branches.name"]),
)

segments = Table(
    "segments",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("rows", BigInteger, nullable=False),
    Column("kind", String, nullable=False),
    Column("layout", Integer, nullable=False),
    Column("branch", String, nullable=False),
    Column("commit_seq", BigInteger, nullable=False),  # first_seq of its commit
    Column("logical_hash", LargeBinary, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    *(Column(f"{end}_{name}", BigInteger) for name in RANGES for end in ("min", "max")),
    ForeignKeyConstraint(["run_id", "commit_seq"], ["commits.run_id", "commits.first_seq"]),
)

locations = Table(
    "locations",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("path", String, nullable=False),
    Column("format", String, nullable=False),
    Column("row_offset", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("file_hash", LargeBinary, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    ForeignKeyConstraint(["run_id", "first_seq"], ["segments.run_id", "segments.first_seq"]),
)
Index("ix_locations_path", locations.c.path)

versions = Table(
    "versions",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("weight_version", BigInteger, primary_key=True, autoincrement=False),
    Column("parent_version", BigInteger),
    Column("branch", String, nullable=False),
    Column("step", BigInteger),
    Column("root", LargeBinary, nullable=False),
    Column("seq", BigInteger, nullable=False),  # the weights_published event
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

consumption = Table(
    "consumption",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("branch", String, primary_key=True),
    Column("sample_index", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),  # the step_committed event
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

tombstones = Table(
    "tombstones",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),  # the rows_retired event that says why
    ForeignKeyConstraint(["run_id", "first_seq"], ["segments.run_id", "segments.first_seq"]),
)

unreferenced = Table(
    "unreferenced",
    METADATA,
    Column("path", String, primary_key=True),
    Column("run_id", String, nullable=False),
    Column("since", BigInteger, nullable=False),  # microseconds since 1970-01-01 UTC
    Column("size_bytes", BigInteger, nullable=False),
    Column("reason", String, nullable=False),  # 'compacted' or 'retired'
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

exports = Table(
    "exports",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("last_seq", BigInteger, nullable=False),  # links up to here lie beside the data
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)
