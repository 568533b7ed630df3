"""Retiring rows: what a `rows_retired` event does to the catalog, in the transaction of its commit.

The segments stay in the order and in the chain; their locations go, tombstones take their place,
and files that no segment lies in any more are listed for collection.
"""

from __future__ import annotations

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import select_in
from ledger.catalog.records import Retired
from ledger.catalog.unreferenced import list_unreferenced
from ledger.errors import Conflict, explain

__all__ = ["RETIRABLE", "retire_rows"]

RETIRABLE = frozenset(
    {
        "indexer_recorded",
        "observation_appended",
        "routing_recorded",
        "segment_generated",
        "signal_recorded",
    }
)
"""Kinds whose rows may go: what is recorded for each token. Everything else is small, and tells
what happened: runs, branches, versions, steps, prompts, rewards and decisions stay for ever."""


def retire_rows(
    connection: sa.Connection, run_id: str, branch: str, retired: Retired, base: int
) -> None:
    """Put tombstones in place of the locations that the event names. The run must be locked.

    Raises:
        Conflict: it names a segment that is not there, is not of that kind, branch and size, whose
            rows are gone already, or of a kind whose rows must stay. Nothing is changed.
    """
    where = f"run {run_id!r}, branch {branch!r}, {retired.kind}"
    if retired.kind not in RETIRABLE:
        raise _refused(where, f"a kind whose rows may go: {sorted(RETIRABLE)}", retired.kind)
    s, gone, loc = t.segments, t.tombstones, t.locations
    query = (
        sa.select(s.c.first_seq, s.c.rows, s.c.kind, s.c.branch, loc.c.path, loc.c.size_bytes)
        .outerjoin(loc, (loc.c.run_id == s.c.run_id) & (loc.c.first_seq == s.c.first_seq))
        .where(s.c.run_id == run_id)
    )
    rows_found = select_in(connection, query, s.c.first_seq, retired.first_seqs)
    found = {row.first_seq: row for row in rows_found}
    for first_seq, rows in zip(retired.first_seqs, retired.row_counts, strict=True):
        row = found.get(first_seq)
        at = f"{where}, seq {first_seq}"
        if row is None or (row.kind, row.branch, row.rows) != (retired.kind, branch, rows):
            there = "none" if row is None else f"{row.rows} rows of {row.kind} on {row.branch!r}"
            raise _refused(at, f"a segment of {rows} rows of that kind and branch", there)
        if row.path is None:
            raise _refused(at, "rows that are still kept", "retired already")
    if len(found) != len(retired.first_seqs):
        raise _refused(where, "each segment once", f"{len(retired.first_seqs)} named")
    seq = base + retired.offset
    connection.execute(
        gone.insert(),
        [
            {"run_id": run_id, "first_seq": first_seq, "seq": seq}
            for first_seq in retired.first_seqs
        ],
    )
    here = loc.delete().where(loc.c.run_id == run_id, loc.c.first_seq == sa.bindparam("of_seq"))
    connection.execute(here, [{"of_seq": first_seq} for first_seq in retired.first_seqs])
    files = {row.path: row.size_bytes for row in found.values()}
    list_unreferenced(connection, run_id, files.items(), "retired")


def _refused(on: str, expected: object, found: object) -> Conflict:
    return Conflict(explain("rows were not retired", on=on, expected=expected, found=found))
