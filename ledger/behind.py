"""A catalog that is behind its store: put back from an older copy, it lacks the newest commits.

Whoever appends to it writes a second history beside the first one. The links in the store tell of
it: an exporter goes on from where the catalog says that the last one ended, so whatever the lost
commits had for links begins after the place that an older copy names.
"""

from __future__ import annotations

import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.engine import Catalog
from ledger.errors import Conflict, explain
from ledger.links import last_told, links_folder
from ledger.storage import ObjectStore

__all__ = ["require_not_behind"]


def require_not_behind(catalog: Catalog, store: ObjectStore, run_id: str) -> None:
    """Raise where the store has links of commits that the catalog does not have.

    It costs one listing, of what was exported since the catalog took note of it: next to nothing.

    Raises:
        Conflict: the catalog is behind.
        StorageFailed: the store or the catalog cannot be read.
    """
    exported = sa.select(t.exports.c.last_seq).where(t.exports.c.run_id == run_id)
    with catalog.read() as connection:
        done = connection.execute(exported).scalar() or 0
    folder = links_folder(run_id)
    # '~' sorts after every digit: of links that begin at `done` or before nothing is needed.
    told = max(map(last_told, store.list(folder, after=f"{folder}/{done:020d}-~")), default=0)
    if not told:
        return
    # The head is read last: others commit, and write links of that, meanwhile.
    with catalog.read() as connection:
        head = connection.execute(
            sa.select(t.runs.c.head_seq).where(t.runs.c.run_id == run_id)
        ).scalar()
    if told > (head or 0):
        raise Conflict(
            explain(
                "nothing was written: the catalog is behind the store",
                on=f"run {run_id!r}, {folder}",
                expected=f"links up to seq {head}, the catalog's last",
                found=f"links up to seq {told}",
                do="the catalog was put back from an older copy: ledger rebuild-catalog --force",
            )
        )
