"""Files that no segment lies in any more, listed until garbage collection removes them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import sqlalchemy as sa

from ledger.catalog import tables as t

__all__ = ["list_unreferenced"]


def list_unreferenced(
    connection: sa.Connection, run_id: str, files: Iterable[tuple[str, int]], reason: str
) -> None:
    """Of these (path, size in bytes), list those that no location names, and unlist the others."""
    now = time.time_ns() // 1000
    for path, size_bytes in files:
        this = t.unreferenced.c.path == path
        listed = connection.execute(sa.select(t.unreferenced.c.path).where(this)).first()
        lies = sa.select(t.locations.c.path).where(t.locations.c.path == path).limit(1)
        named = connection.execute(lies).first()
        if named is not None:
            if listed is not None:
                connection.execute(t.unreferenced.delete().where(this))
        elif listed is None:
            connection.execute(
                t.unreferenced.insert().values(
                    path=path, run_id=run_id, since=now, size_bytes=size_bytes, reason=reason
                )
            )
