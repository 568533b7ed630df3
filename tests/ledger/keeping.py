"""What the tests of keeping share: all rows of a catalog, and the ledger as a reader sees it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ledger import Ledger
from ledger.catalog.tables import METADATA
from ledger.hashing import logical_hash
from tests.ledger import factory

PROGRESS = ("exports", "unreferenced")
"""Tables that say how far background work has come: no part of what was committed."""


def all_rows(ledger: Ledger, *leave_out: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, sorted."""
    with ledger.catalog.read() as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
            for table in METADATA.sorted_tables
            if table.name not in leave_out
        }


def what_readers_see(ledger: Ledger, run_id: str = factory.RUN) -> dict[str, Any]:
    """Kind → logical hash and place of all rows, on all branches; and the content digests."""
    reader = ledger.reader(run_id, None)
    seen: dict[str, Any] = {}
    for kind in reader.kinds():
        table = reader.table(kind)
        seen[kind] = (logical_hash(table), table["seq"].to_pylist(), table["branch"].to_pylist())
    for branch in ledger.branches(run_id):
        seen[f"digest of {branch.name}"] = ledger.content_digest(run_id, branch.name)
    return seen
