"""Where a moment of a run lies in its order: questions to the catalog."""

from __future__ import annotations

import sqlalchemy as sa

from ledger.catalog import tables as t

__all__ = ["last_seq_at", "last_seq_of_commit", "segment_start"]


def last_seq_of_commit(connection: sa.Connection, run_id: str, seq: int) -> int:
    """The last number of the commit that holds `seq`; `seq` itself where there is none."""
    c = t.commits.c
    found = connection.execute(
        sa.select(c.last_seq)
        .where(c.run_id == run_id, c.first_seq <= seq, c.last_seq >= seq)
        .limit(1)
    ).scalar()
    return seq if found is None else int(found)


def last_seq_at(connection: sa.Connection, run_id: str, time_us: int) -> int:
    """The last number that was committed at or before a time (microseconds since 1970 UTC).

    0 where nothing was.
    """
    c = t.commits.c
    found = connection.execute(
        sa.select(sa.func.max(c.last_seq)).where(c.run_id == run_id, c.committed_at <= time_us)
    ).scalar()
    return 0 if found is None else int(found)


def segment_start(connection: sa.Connection, run_id: str, seq: int) -> int:
    """The first number of the segment that holds `seq`; `seq` + 1 where that ends with it.

    A follower that has seen all up to `seq` begins there.
    """
    s = t.segments.c
    found = connection.execute(
        sa.select(s.first_seq, s.rows)
        .where(s.run_id == run_id, s.first_seq <= seq)
        .order_by(s.first_seq.desc())
        .limit(1)
    ).first()
    if found is None or found.first_seq + found.rows - 1 <= seq:
        return seq + 1
    return int(found.first_seq)
