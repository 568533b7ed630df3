"""What is missing from the ledger, said in the ledger: never more than that, and never twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.records import Receipt
from ledger.events import GapRecorded
from ledger.redact import redact_text

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.views import TableSource

__all__ = ["Lost", "find_stored", "gap_events", "gap_line", "read_gaps", "still_missing"]


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """One append that will not reach the ledger."""

    producer: str
    epoch: int
    number: int | None
    """Its producer_seq; None where it never had one, and so cannot be there."""
    rows: Mapping[str, int]
    """Events by kind; empty where nobody can say any more."""
    at: int | None
    """When it was appended or spilled: microseconds since 1970-01-01 UTC."""


def find_stored(
    ledger: Ledger, run_id: str, producer: str, epoch: int, number: int
) -> Receipt | None:
    """The receipt of the commit with this key, whoever asks: fencing plays no part."""
    query = sa.select(t.commits).where(
        t.commits.c.run_id == run_id,
        t.commits.c.producer == producer,
        t.commits.c.epoch == epoch,
        t.commits.c.producer_seq == number,
    )
    with ledger.catalog.read() as connection:
        row = connection.execute(query).first()
    return None if row is None else Receipt(row.first_seq, row.last_seq, bytes(row.chain))


def still_missing(ledger: Ledger, run_id: str, lost: Sequence[Lost]) -> list[Lost]:
    """Those that are neither stored (their acknowledgement was lost) nor recorded as missing."""
    recorded: set[tuple[str, int, int]] = set()
    gaps = ledger.reader(run_id, None).table(GapRecorded.KIND)
    columns = ("producer", "epoch", "first_producer_seq", "last_producer_seq")
    for producer, epoch, first, last in zip(
        *(gaps.column(name).to_pylist() for name in columns), strict=True
    ):
        if first is not None and last is not None:
            recorded |= {(producer, epoch, number) for number in range(first, last + 1)}
    return [
        one
        for one in lost
        if one.number is None
        or (
            (one.producer, one.epoch, one.number) not in recorded
            and find_stored(ledger, run_id, one.producer, one.epoch, one.number) is None
        )
    ]


def gap_events(lost: Sequence[Lost], reason: str) -> list[GapRecorded]:
    """One event for each unbroken range of numbers, and one for what never had a number."""
    ranges: dict[tuple[str, int, int | None], list[Lost]] = {}
    before: tuple[str, int, int] | None = None
    first: int | None = None
    for one in sorted(lost, key=lambda one: (one.producer, one.epoch, one.number or 0)):
        number = one.number
        if number is None:
            ranges.setdefault((one.producer, one.epoch, None), []).append(one)
            continue
        if before != (one.producer, one.epoch, number - 1):
            first = number
        ranges.setdefault((one.producer, one.epoch, first), []).append(one)
        before = (one.producer, one.epoch, number)
    return [_event(of_range, reason) for of_range in ranges.values()]


def _event(lost: Sequence[Lost], reason: str) -> GapRecorded:
    counts: dict[str, int] = {}
    for one in lost:
        for kind, rows in one.rows.items():
            counts[kind] = counts.get(kind, 0) + rows
    unknown = sum(not one.rows for one in lost)
    if unknown:
        reason += f"; what {unknown} of {len(lost)} appends held is not known any more"
    times = [one.at for one in lost if one.at is not None]
    return GapRecorded(
        producer=lost[0].producer,
        epoch=lost[0].epoch,
        first_producer_seq=lost[0].number,
        last_producer_seq=lost[-1].number,
        kinds=list(counts),
        counts=np.array(list(counts.values()), np.int64),
        began_at=min(times, default=None),
        ended_at=max(times, default=None),
        reason=redact_text(reason),
    )


def read_gaps(reader: TableSource) -> list[dict[str, Any]]:
    """What is recorded as missing, in order: branch, seq, and the fields of gap_recorded."""
    rows: list[dict[str, Any]] = reader.table(GapRecorded.KIND).sort_by("seq").to_pylist()
    for row in rows:
        for name in ("began_at", "ended_at", "recorded_at"):
            if row[name] is not None:
                row[name] = row[name].isoformat(timespec="seconds")
    return rows


def gap_line(gap: Mapping[str, Any]) -> str:
    """One of `read_gaps` as a person reads it."""
    first, last = gap["first_producer_seq"], gap["last_producer_seq"]
    numbers = (
        "" if first is None else f", append {first}" + (f" to {last}" if last != first else "")
    )
    counts = [f"{n} {kind}" for kind, n in zip(gap["kinds"], gap["counts"], strict=True)]
    times = sorted({gap[name] for name in ("began_at", "ended_at") if gap[name] is not None})
    return (
        f"missing on {gap['branch']}, recorded at seq {gap['seq']}: "
        f"{', '.join(counts) or 'nobody knows what'} of producer {gap['producer']!r}, "
        f"epoch {gap['epoch']}{numbers}"
        + (f", from {' to '.join(times)}" if times else "")
        + f": {gap['reason']}"
    )
