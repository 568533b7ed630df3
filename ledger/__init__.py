"""The trajectory ledger: every event of reinforcement-learning training, once, for good.

    with open_ledger("runs/ledger", create=True) as ledger: ...

Importing this package imports nothing heavy; what it exposes is loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ledger.store import Ledger, open_ledger

__all__ = ["Ledger", "__version__", "open_ledger"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Ledger", "open_ledger"):
        from ledger import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
