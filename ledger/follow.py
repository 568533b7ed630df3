"""Following a run: new events in order, none missed, none twice, at the cost of what is new.

Sequence numbers are given inside of a commit, one commit after the other, so that whatever becomes
visible later has a larger number: it is enough to remember the last one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledger.catalog import queries
from ledger.catalog.moments import segment_start
from ledger.errors import InvalidArgument, NoLongerKept, explain
from ledger.scan import PLACE_TYPES
from ledger.schema import require_kinds, upcast

if TYPE_CHECKING:
    from ledger.catalog.records import SegmentInfo
    from ledger.store import Ledger

__all__ = ["NewEvents", "events_after", "follow"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NewEvents:
    """Events of one kind on one branch, numbered without gap."""

    kind: str
    branch: str
    first_seq: int
    last_seq: int
    """Give it as `since` to go on after these events."""
    table: pa.Table | None
    """The event's columns with run_id, branch and seq. None: its rows are no longer kept."""


def events_after(
    ledger: Ledger,
    run_id: str,
    since: int = 0,
    *,
    kinds: Collection[str] | None = None,
    branch: str | None = None,
    verify: bool = True,
) -> Iterator[NewEvents]:
    """What is in the run now with a number above `since`, in order; see `follow`."""
    return _Follower(ledger, run_id, since, kinds, branch, verify).news()


def follow(
    ledger: Ledger,
    run_id: str,
    since: int = 0,
    *,
    kinds: Collection[str] | None = None,
    branch: str | None = None,
    poll_s: float = 0.5,
    stop: threading.Event | None = None,
    verify: bool = True,
) -> Iterator[NewEvents]:
    """Events with a number above `since`, in order, for ever: what is there, then what comes.

    Each event comes once. `kinds` and `branch` (with its ancestors up to the fork; None: all) leave
    others out. It looks for new ones every `poll_s` seconds, and ends within that time of `stop`,
    when all that had been found was given.

    Raises:
        NotFound: no such run or branch.
        InvalidArgument: a kind that is none, `since` below 0 or above the run's last event,
            `poll_s` not above 0.
        Corrupt: a file is missing or is not what was committed.
    """
    if not poll_s > 0:
        raise InvalidArgument(
            explain("a run was not followed", on="poll_s", expected="above 0", found=poll_s)
        )
    follower = _Follower(ledger, run_id, since, kinds, branch, verify)
    return _for_ever(follower, poll_s, _Never() if stop is None else stop)


def _for_ever(follower: _Follower, poll_s: float, stop: threading.Event) -> Iterator[NewEvents]:
    while True:
        stopped = stop.is_set()
        yield from follower.news()
        if stopped:
            return
        stop.wait(poll_s)


class _Never(threading.Event):
    """Waits, and is never set."""


class _Follower:
    """Where a follower stands."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        since: int,
        kinds: Collection[str] | None,
        branch: str | None,
        verify: bool,
    ) -> None:
        if since < 0:
            raise InvalidArgument(
                explain("a run was not followed", on="since", expected="0 or more", found=since)
            )
        require_kinds(kinds)
        head = ledger.run(run_id).head_seq
        if since > head:
            # Waiting until the run is that long would miss all events up to there.
            raise InvalidArgument(
                explain(
                    "a run was not followed: it has not come as far as that",
                    on=f"run {run_id!r}",
                    expected=f"since from 0 to {head}",
                    found=since,
                    do="if it once had: its catalog is an older copy, see `ledger verify`",
                )
            )
        self._ledger = ledger
        self._run_id = run_id
        self._since = since
        self._kinds = None if kinds is None else frozenset(kinds)
        self._verify = verify
        self._lineage: dict[str, int | None] | None = None
        with ledger.catalog.read() as connection:
            if branch is not None:
                self._lineage = dict(queries.ancestry(connection, run_id, branch))
            # `since` may lie within a segment: begin with the one that holds it.
            self._after = segment_start(connection, run_id, since) - 1

    def news(self) -> Iterator[NewEvents]:
        """What came since the last time."""
        with self._ledger.catalog.read() as connection:
            found = queries.segments_after(connection, self._run_id, self._after)
        for segment in found:
            first, last = self._seen(segment)
            wanted = self._kinds is None or segment.kind in self._kinds
            if first <= last and wanted:
                yield NewEvents(
                    segment.kind, segment.branch, first, last, self._table(segment, first, last)
                )
            self._after = segment.first_seq
            self._since = max(self._since, segment.last_seq)

    def _seen(self, segment: SegmentInfo) -> tuple[int, int]:
        """First and last number of a segment that are new and on the branch; none: last < first."""
        first, last = max(segment.first_seq, self._since + 1), segment.last_seq
        if self._lineage is not None:
            limit = self._lineage.get(segment.branch, 0)
            last = last if limit is None else min(last, limit)
        return first, last

    def _table(self, segment: SegmentInfo, first: int, last: int) -> pa.Table | None:
        try:
            table = upcast(self._ledger.index.open(segment, verify=self._verify))
        except NoLongerKept:
            return None
        table = table.slice(first - segment.first_seq, last - first + 1)
        table = table.select([name for name in table.column_names if name not in PLACE_TYPES])
        code = pa.array(np.zeros(table.num_rows, np.int32))
        place = {
            "run_id": pa.DictionaryArray.from_arrays(code, pa.array([self._run_id])),
            "branch": pa.DictionaryArray.from_arrays(code, pa.array([segment.branch])),
            "seq": pa.array(np.arange(first, last + 1)),
        }
        for name, type_ in PLACE_TYPES.items():
            table = table.append_column(pa.field(name, type_, nullable=False), place[name])
        return table
