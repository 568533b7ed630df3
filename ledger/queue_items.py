"""What a queued writer holds and tells: waiting appends, acknowledgements, its state."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

import pyarrow as pa

from ledger.catalog.records import Receipt
from ledger.errors import InvalidArgument, LedgerError, explain
from ledger.gaps import Lost
from ledger.spill import SpillFile

__all__ = [
    "Acknowledgement",
    "Gap",
    "Item",
    "QueueLimits",
    "QueueState",
    "QueueStats",
    "SpilledReceipt",
    "merge",
]


class QueueState(enum.StrEnum):
    """How a queue fares."""

    RUNNING = "running"
    RETRYING = "retrying"
    """The store refuses for the moment; what waits is tried again."""
    SPILLING = "spilling"
    """Appends go to local disk, and from there to the ledger, in order."""
    STOPPED = "stopped"
    """Nothing is taken or delivered until `resume` or `abandon`."""
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStats:
    """One look at a queue."""

    state: QueueState
    queued_appends: int
    """Appends that the ledger does not have yet, spilled ones included."""
    queued_events: int
    queued_bytes: int
    """Bytes of them in memory."""
    oldest_age_s: float
    """Since when the oldest of them waits; 0 where nothing does."""
    spilled_appends: int
    """Of them, those that lie on local disk."""
    spilled_bytes: int
    stored_appends: int
    """Appends that the ledger has taken from this queue."""
    stored_events: int
    last_error: str | None
    """The newest trouble, also where it has passed."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a queue may hold, and for how long it has patience."""

    max_bytes: int
    max_events: int
    policy: Literal["stop", "spill"]
    max_spill_bytes: int | None
    patience_s: float
    """For how long the store may fail or stand still before the policy acts."""
    block_timeout_s: float

    @property
    def spills(self) -> bool:
        return self.policy == "spill"

    def require_usable(self) -> None:
        """Raise InvalidArgument where a limit is no number, or one that nothing fits."""
        for name, low in (
            *(("max_bytes", 1), ("max_events", 1), ("max_spill_bytes", 0)),
            *(("patience_s", 0), ("block_timeout_s", 0)),
        ):
            value = getattr(self, name)
            if value is None and name == "max_spill_bytes":
                continue
            if not isinstance(value, int | float) or not value >= low:  # NaN too
                raise InvalidArgument(
                    explain(
                        "a queue was not made",
                        on=name,
                        expected=f"a number, at least {low}",
                        found=repr(value),
                    )
                )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SpilledReceipt:
    """The events survive a crash of this machine, but only on its disk: the ledger lacks them yet.

    They are delivered in order under their own key, by this queue or by the next one of the same
    producer with the same spill folder. What cannot be delivered is recorded as a gap.
    """

    file: SpillFile
    delivered: Future[Receipt]
    """Done when the ledger has them, or it is clear that this queue will not bring them there."""


Acknowledgement = Receipt | SpilledReceipt


@dataclasses.dataclass(slots=True, eq=False)
class Gap:
    """What is to be recorded as missing, once the ledger can take that."""

    lost: list[Lost]
    reason: str
    files: list[SpillFile]
    """To be set aside afterwards."""
    then_stop: LedgerError | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Item:
    """Appends that share a commit and a number."""

    tables: dict[str, pa.Table] | None
    """None where they are on disk, or still to be made (a gap)."""
    rows: dict[str, int]
    """Events by kind, in order."""
    size_bytes: int
    at: int
    """Microseconds since 1970-01-01 UTC."""
    futures: list[Future[Any]] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    """Events of each append, in the order of `futures`."""
    number: int | None = None
    file: SpillFile | None = None
    gap: Gap | None = None
    parts: list[Item] = dataclasses.field(default_factory=list)
    """What it was merged from."""
    alone: bool = False
    serial: int = 0
    """Place of its first append among all of the queue."""
    added_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def events(self) -> int:
        return sum(self.rows.values())

    def receipts(self, whole: Receipt) -> list[Receipt]:
        """The receipt of each append: a merge keeps the order, so its events are neighbours."""
        ends = list(itertools.accumulate(self.counts, initial=whole.first_seq))
        return [
            Receipt(first, end - 1, whole.chain) for first, end in itertools.pairwise(ends)
        ] or [whole]


def merge(items: Sequence[Item], max_bytes: int) -> Item:
    """One item of as many leading `items` as can share a commit without changing their order.

    A commit holds one segment a kind, so an append joins if its first kind is the last one so far
    and its other kinds are new.
    """
    first = items[0]
    taken, rows, size = [first], dict(first.rows), first.size_bytes
    if first.alone or first.number is not None or first.gap is not None:
        return first
    for item in itertools.islice(items, 1, None):
        kinds = list(item.rows)
        size += item.size_bytes
        if (
            size > max_bytes
            or item.alone
            or item.number is not None
            or item.gap is not None
            or kinds[0] != next(reversed(rows))
            or not rows.keys().isdisjoint(kinds[1:])
            or "branch_forked" in kinds
        ):
            break
        taken.append(item)
        for kind, count in item.rows.items():
            rows[kind] = rows.get(kind, 0) + count
    if len(taken) == 1:
        return first
    every = [item.tables for item in taken if item.tables is not None]
    return Item(
        {kind: pa.concat_tables([t[kind] for t in every if kind in t]) for kind in rows},
        rows,
        sum(item.size_bytes for item in taken),
        first.at,
        [future for item in taken for future in item.futures],
        [count for item in taken for count in item.counts],
        parts=taken,
        serial=first.serial,
        added_at=first.added_at,
    )
