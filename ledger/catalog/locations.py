"""Where segments lie, and moving them: what was committed stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.commit import lock_run
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.catalog.unreferenced import list_unreferenced
from ledger.segment import SegmentFile

__all__ = ["move", "parts_of"]

_loc = t.locations.c
_MOVE = (
    t.locations.update()
    .where(
        _loc.run_id == sa.bindparam("of_run"),
        _loc.first_seq == sa.bindparam("of_seq"),
        _loc.path == sa.bindparam("from_path"),
        _loc.row_offset == sa.bindparam("from_offset"),
    )
    .values(
        path=sa.bindparam("to_path"),
        format=sa.bindparam("to_format"),
        row_offset=sa.bindparam("to_offset"),
        rows=sa.bindparam("to_rows"),
        file_hash=sa.bindparam("to_hash"),
        size_bytes=sa.bindparam("to_size"),
    )
)


def parts_of(connection: sa.Connection, run_id: str) -> list[SegmentInfo]:
    """All segments of a run, in order, with where they lie now."""
    return segments_after(connection, run_id, 0)


def move(
    connection: sa.Connection, moves: Sequence[tuple[SegmentInfo, SegmentFile]], reason: str
) -> int:
    """Let each segment lie in its new file, where it still lies where it was; how many did.

    Of one run. To be called in a write transaction, with the new files durable. Files that no
    segment lies in afterwards, old or new, are listed as unreferenced; new ones that were are not
    any more.
    """
    if not moves:
        return 0
    run_id = moves[0][0].run_id
    lock_run(connection, run_id)
    moved = 0
    sizes: dict[str, int] = {}
    for segment, to in moves:
        if segment.file is None:
            continue
        sizes[segment.file.path] = segment.file.size_bytes
        sizes[to.path] = to.size_bytes
        changed = connection.execute(
            _MOVE,
            {
                "of_run": run_id,
                "of_seq": segment.first_seq,
                "from_path": segment.file.path,
                "from_offset": segment.file.row_offset,
                "to_path": to.path,
                "to_format": to.format,
                "to_offset": to.row_offset,
                "to_rows": to.rows,
                "to_hash": to.file_hash,
                "to_size": to.size_bytes,
            },
        ).rowcount
        if not changed:
            # The transaction is run again after a lost acknowledgement: it may be there already.
            there = (
                (_loc.run_id == run_id)
                & (_loc.first_seq == segment.first_seq)
                & (_loc.path == to.path)
                & (_loc.row_offset == to.row_offset)
            )
            changed = connection.execute(sa.select(sa.func.count()).where(there)).scalar() or 0
        moved += changed
    list_unreferenced(connection, run_id, sizes.items(), reason)
    return moved
