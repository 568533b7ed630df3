"""Whether a place keeps the promise that everything rests on: a name is given once."""

from __future__ import annotations

import secrets

from ledger.errors import Corrupt, StorageFailed, explain
from ledger.storage.protocol import ObjectStore

__all__ = ["PROBES", "require_exclusive_create"]

PROBES = "probe"
"""The folder of objects that only try a store out; a crash may leave one there."""


def require_exclusive_create(store: ObjectStore) -> None:
    """Try on the place itself that an object cannot be overwritten. Leaves nothing there.

    Services that speak like S3 but do not know conditional writes overwrite without a word. Asked
    once, when a ledger is made; costs four requests on S3.

    Raises:
        StorageFailed: a second object under one name was taken, or the place failed.
    """
    path = f"{PROBES}/{secrets.token_hex(8)}"
    store.put([(path, b"first")])
    try:
        store.put([(path, b"second")])
    except Corrupt:
        return
    finally:
        store.delete(path)
    raise StorageFailed(
        explain(
            "a ledger cannot lie here: this place overwrites objects",
            on=store.uri,
            expected="the second creation of an object is refused (S3: If-None-Match: *)",
            found="it was taken",
            do="use a service with conditional writes, or a newer version of this one",
        )
    )
