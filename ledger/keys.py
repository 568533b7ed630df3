"""What an idempotency key is made of, as callers give it: a name, and two numbers.

They go into the chain as text and into the catalog as values, so each must be the same in both: a
float or a boolean would be stored as a number and chained as something else, for ever.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["require_number", "require_producer"]

_MOST = 2**63 - 1


def require_producer(name: Any) -> str:
    """A producer's name as it was given. Raises: InvalidArgument, where it can be none."""
    if isinstance(name, str) and name and "\0" not in name:
        try:
            name.encode()
        except UnicodeEncodeError:
            pass
        else:
            return name
    raise InvalidArgument(
        explain(
            "a writer was not made: its producer has no name that can be stored",
            expected="text of 1 character or more, in UTF-8, without NUL",
            found=f"{type(name).__name__} {name!a}",
        )
    )


def require_number(what: str, number: Any) -> int:
    """An integer of any kind as an int. Raises: InvalidArgument, where it is none, or too large."""
    found = -1
    if not isinstance(number, bool):
        with contextlib.suppress(TypeError):
            found = operator.index(number)
    if 0 <= found <= _MOST:
        return found
    raise InvalidArgument(
        explain(
            f"an append was refused: {what}",
            expected=f"an integer from 0 to {_MOST}",
            found=f"{type(number).__name__} {number!r}",
        )
    )
