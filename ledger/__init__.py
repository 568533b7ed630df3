"""The trajectory ledger: every event of reinforcement-learning training, once, for good.

    with open_ledger("runs/ledger", create=True) as ledger: ...

Importing this package imports nothing heavy; what it exposes is loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ledger.opening import open_ledger
    from ledger.store import Ledger

__all__ = ["Ledger", "__version__", "open_ledger"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Ledger":
        from ledger.store import Ledger

        return Ledger
    if name == "open_ledger":
        from ledger.opening import open_ledger

        return open_ledger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
