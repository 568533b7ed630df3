"""Places for bytes behind one small protocol."""

from ledger.storage.by_uri import open_store
from ledger.storage.local import LocalStore
from ledger.storage.protocol import ObjectStore, Staged, Stamp

__all__ = ["LocalStore", "ObjectStore", "Staged", "Stamp", "open_store"]
