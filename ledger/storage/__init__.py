"""Places for bytes behind one small protocol."""

from ledger.storage.local import LocalStore
from ledger.storage.protocol import ObjectStore, Staged, Stamp

__all__ = ["LocalStore", "ObjectStore", "Staged", "Stamp"]
