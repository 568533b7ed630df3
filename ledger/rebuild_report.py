"""What a store tells of its runs, and what of that is damaged: the outcome of reading it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ledger.errors import explain
from ledger.finding import Finding

__all__ = ["RebuildReport", "Unlinked"]


@dataclasses.dataclass(frozen=True, slots=True)
class Unlinked:
    """Segment files of one producer that no link mentions: commits whose links were not written.

    Or files of appends that were never committed: the files alone do not tell which.
    """

    run_id: str
    producer: str
    epoch: int
    files: int
    appends: int
    """Different idempotency keys among them."""


@dataclasses.dataclass(frozen=True, slots=True)
class RebuildReport:
    """What was restored, or (dry run) would be."""

    ledger_id: str | None
    """None where there is no run, and nothing else says which ledger this is."""
    runs: int
    commits: int
    segments: int
    events: int
    sealed: int
    """Segments that lie in sealed files."""
    retired: int
    """Segments whose rows are no longer kept, by an event that says so."""
    unlinked: tuple[Unlinked, ...]
    findings: tuple[Finding, ...]
    """What is damaged, and so could not be restored as it was."""
    beyond: tuple[str, ...]
    """Objects of links that tell of commits after a hole or a break of the chain: left out."""
    rows: Mapping[str, list[dict[str, Any]]]
    """By table, for `fill`."""

    @property
    def ok(self) -> bool:
        """Nothing is damaged. Links that were not written in time are no damage."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "ledger_id": self.ledger_id,
            "runs": self.runs,
            "commits": self.commits,
            "segments": self.segments,
            "events": self.events,
            "sealed": self.sealed,
            "retired": self.retired,
            "unlinked": [dataclasses.asdict(u) for u in self.unlinked],
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "beyond": list(self.beyond),
        }

    def lines(self) -> list[str]:
        """For a reader."""
        made = [line for f in self.findings for line in str(f).splitlines()]
        for u in self.unlinked:
            made += explain(
                "segment files that no link mentions",
                on=f"run {u.run_id!r}, producer {u.producer!r}, epoch {u.epoch}",
                found=f"{u.files} files of {u.appends} appends: never committed, or committed in "
                "the last second before a crash, when their links were not written yet",
                do="let that producer append again what it holds no receipt for; `ledger gc` "
                "removes the files later",
            ).splitlines()
        made.append(
            f"{self.runs} runs, {self.commits} commits, {self.segments} segments "
            f"({self.sealed} sealed, {self.retired} retired), {self.events} events"
        )
        return made
