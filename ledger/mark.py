"""`ledger.json`, at the root of a store: says that this is a ledger, which one, and of what format.

It is written once, before anything else, and never changed. It names the kind of catalog that the
ledger needs, never its address or a password. Ledgers that were made before it existed have none:
there the catalog lies in the folder itself.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ledger.errors import Corrupt, NotFound, explain
from ledger.storage import ObjectStore

__all__ = ["MARK", "Mark", "read_mark", "write_mark"]

MARK = "ledger.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What `ledger.json` says."""

    format: int
    """Version of the stored format as a whole."""
    ledger_id: str
    """32 hexadecimal digits; the catalog's `meta` has the same."""
    catalog: str
    """Kind of its catalog: 'sqlite' or 'postgresql'."""


def read_mark(store: ObjectStore) -> Mark | None:
    """The mark of a store; None where it has none.

    Raises:
        Corrupt: the object is there but does not say these things.
        StorageFailed: the store cannot be read.
    """
    try:
        stored = bytes(store.read(MARK))
    except NotFound:
        return None
    try:
        said: Any = json.loads(stored)
        mark = Mark(said["format"], said["ledger_id"], said["catalog"])
        sound = (
            isinstance(mark.format, int)
            and isinstance(mark.ledger_id, str)
            and isinstance(mark.catalog, str)
        )
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise Corrupt(
            explain(
                "a ledger does not say what it is",
                on=f"{MARK} in {store.uri}",
                expected='{"catalog": …, "format": …, "ledger_id": …}',
                found=repr(stored[:200]),
                do="put the file back from a copy",
            )
        )
    return mark


def write_mark(store: ObjectStore, mark: Mark) -> Mark:
    """Write the mark, durably, where there is none; gives the one that the store has then.

    Of several processes that do so at once one wins.

    Raises:
        StorageFailed: the store did not take it.
    """
    text = json.dumps(dataclasses.asdict(mark), indent=1, sort_keys=True) + "\n"
    try:
        store.put([(MARK, text.encode())])
    except Corrupt:  # the name is taken by other bytes
        there = read_mark(store)
        if there is None:
            raise
        return there
    return mark
