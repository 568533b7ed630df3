"""What the catalog gives back, and what a commit hands to it: frozen records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ledger.segment import SegmentFile

__all__ = [
    "MAIN",
    "BranchInfo",
    "Consumed",
    "Forked",
    "PendingCommit",
    "PendingSegment",
    "Published",
    "Receipt",
    "Retired",
    "RunInfo",
    "SegmentInfo",
    "VersionInfo",
]

MAIN = "main"
"""The branch that every run begins with."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunInfo:
    run_id: str
    created_at: int
    """Microseconds since 1970-01-01 UTC."""
    head_seq: int
    """Number of the last event; 0 where there is none."""
    head_chain: bytes
    """The last link of the hash chain: it covers every event of the run."""


@dataclasses.dataclass(frozen=True, slots=True)
class BranchInfo:
    run_id: str
    name: str
    parent: str | None
    fork_seq: int | None
    """Ancestors' events are seen up to this one; None for the run's first branch."""
    fork_version: int | None
    """The weight version it starts from."""
    seq: int | None
    """Number of its branch_forked event."""
    head_seq: int
    """Number of the last event on the branch itself; fork_seq, or 0, where there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class VersionInfo:
    run_id: str
    weight_version: int
    parent_version: int | None
    branch: str
    step: int | None
    root: bytes
    seq: int
    """Number of its weights_published event."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One committed segment, and where its rows lie now."""

    run_id: str
    first_seq: int
    rows: int
    kind: str
    layout: int
    branch: str
    commit_seq: int
    logical_hash: bytes
    chain: bytes
    ranges: Mapping[str, tuple[int, int]]
    """Smallest and largest value of the columns that have it, both included."""
    file: SegmentFile | None
    """None where the rows are no longer kept."""

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.rows - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """What an append made durable: events first_seq to last_seq, and the chain after them."""

    first_seq: int
    last_seq: int
    chain: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PendingSegment:
    """A segment whose file is durable and that waits for its place in the order."""

    kind: str
    layout: int
    logical_hash: bytes
    ranges: Mapping[str, tuple[int, int]]
    file: SegmentFile


@dataclasses.dataclass(frozen=True, slots=True)
class Forked:
    branch: str
    parent: str
    fork_seq: int
    weight_version: int
    offset: int
    """Place of the event within its commit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    weight_version: int
    parent_version: int | None
    step: int | None
    root: bytes
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Consumed:
    step: int
    indices: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Retired:
    kind: str
    first_seqs: tuple[int, ...]
    row_counts: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class PendingCommit:
    """Everything one append asks of the catalog."""

    run_id: str
    branch: str
    producer: str
    epoch: int
    producer_seq: int
    content_hash: bytes
    committed_at: int
    segments: tuple[PendingSegment, ...]
    forked: Forked | None
    published: tuple[Published, ...]
    consumed: tuple[Consumed, ...]
    retired: tuple[Retired, ...] = ()
