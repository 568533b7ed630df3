"""What `ledger verify` says of one place where a ledger is not what it says it is."""

from __future__ import annotations

import dataclasses

__all__ = ["Finding", "as_text"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place where the ledger is not what it says it is."""

    run_id: str | None
    """None: the catalog as a whole."""
    where: str
    """A segment ('segment_generated at seq 17, runs/…'), commit, checkpoint or catalog row."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        run = "" if self.run_id is None else f"run {self.run_id}: "
        return (
            f"{run}{self.where}: {self.what}\n  expected: {self.expected}\n  found:    {self.found}"
        )


def as_text(value: object) -> str:
    """Hashes in hexadecimal, also within a tuple; anything else as it prints."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return "(" + ", ".join(as_text(v) for v in value) + ")"
    return str(value)
