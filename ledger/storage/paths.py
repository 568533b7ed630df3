"""Which names an object may have, in every store."""

from __future__ import annotations

import re

from ledger.errors import Corrupt, explain

__all__ = ["TEMPORARY", "require_folder", "require_path"]

TEMPORARY = ".tmp-"
"""How the name of a file begins that a store is still writing. No object may be called so."""

_FORBIDDEN = re.compile(rf"(?:^|/)(?:\.{{0,2}}(?:/|\Z)|{re.escape(TEMPORARY)})|[\x00-\x1f\x7f\\]")
"""A part that is empty, '.', '..' or unfinished; or a character. One search: every open asks."""


def require_path(path: str) -> None:
    """Refuse a path of an object that lies outside its store, or that stores read differently.

    Raises:
        Corrupt: it is absolute, has an empty part, '.' or '..', a backslash or a control
            character, or a part that begins like the name of an unfinished file.
    """
    if _FORBIDDEN.search(path):
        raise Corrupt(
            explain(
                "a path leaves the store, or is none",
                on=repr(path),
                expected="names below the store's root with '/' between them",
            )
        )


def require_folder(prefix: str) -> None:
    """As `require_path`, for a folder; '' is the root. Raises: Corrupt."""
    if prefix:
        require_path(prefix)
