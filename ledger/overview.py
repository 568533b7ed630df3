"""Lists the runs of a ledger and their branches."""

from __future__ import annotations

import datetime
from typing import Any

import sqlalchemy as sa
from rich.table import Table

from ledger.catalog import tables as t
from ledger.events import GapRecorded
from ledger.store import Ledger

__all__ = ["draw_runs", "read_runs"]


def read_runs(ledger: Ledger) -> list[dict[str, Any]]:
    """Runs, oldest first: run_id, created_at (ISO 8601, UTC), events, chain, branches, versions.

    `gaps` is the number of times that something was recorded as missing.
    """
    found = []
    query = (
        sa.select(t.segments.c.run_id, sa.func.sum(t.segments.c.rows).label("gaps"))
        .where(t.segments.c.kind == GapRecorded.KIND)
        .group_by(t.segments.c.run_id)
    )
    with ledger.catalog.read() as connection:
        gaps = {row.run_id: int(row.gaps) for row in connection.execute(query)}
    for run in ledger.runs():
        versions = ledger.versions(run.run_id)
        created = datetime.datetime.fromtimestamp(run.created_at / 1e6, datetime.UTC)
        found.append(
            {
                "run_id": run.run_id,
                "created_at": created.isoformat(timespec="seconds"),
                "events": run.head_seq,
                "chain": run.head_chain.hex(),
                "gaps": gaps.get(run.run_id, 0),
                "branches": [
                    {
                        "name": branch.name,
                        "parent": branch.parent,
                        "fork_version": branch.fork_version,
                        "fork_seq": branch.fork_seq,
                        "head_seq": branch.head_seq,
                        "versions": sum(v.branch == branch.name for v in versions),
                    }
                    for branch in ledger.branches(run.run_id)
                ],
            }
        )
    return found


def draw_runs(runs: list[dict[str, Any]]) -> Table:
    """One row a branch, to print with rich."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "created", "branch", "from"):
        table.add_column(name, no_wrap=True)
    missing = any(run["gaps"] for run in runs)
    for name in ("versions", "events", "chain", *(["gaps"] if missing else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        for number, branch in enumerate(run["branches"]):
            first = number == 0
            origin = (
                "" if branch["parent"] is None else f"{branch['parent']}@{branch['fork_version']}"
            )
            table.add_row(
                run["run_id"] if first else "",
                run["created_at"] if first else "",
                branch["name"],
                origin,
                str(branch["versions"]),
                str(run["events"]) if first else "",
                run["chain"][:10] if first else "",
                *([str(run["gaps"]) if first else ""] if missing else []),
            )
    return table
