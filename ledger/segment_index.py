"""Which segments a run has and where they lie, remembered; and opening them wherever that is now.

What was committed never changes, so what is remembered of it stays right. Where it lies may change
under a process that runs for long: then it is looked up again when the file is not where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pyarrow as pa
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.engine import Catalog
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.errors import NoLongerKept, SegmentMissing, explain
from ledger.segment_reader import SegmentReader

__all__ = ["SegmentIndex"]


class SegmentIndex:
    """The segments of all runs of one ledger. Threads may share it."""

    def __init__(self, catalog: Catalog, files: SegmentReader) -> None:
        self._catalog, self._files = catalog, files
        self._known: dict[str, list[SegmentInfo]] = {}
        self._lock = threading.Lock()

    def infos(self, run_id: str, up_to: int | None = None) -> list[SegmentInfo]:
        """The segments that begin at or before `up_to` (without it: all), in order.

        Asking again costs only what was committed since.
        """
        with self._lock:
            known = self._known.setdefault(run_id, [])
            last = known[-1].last_seq if known else 0
            if up_to is None or last < up_to:
                with self._catalog.read() as connection:
                    known += segments_after(connection, run_id, last)
            if up_to is None or (known and known[-1].first_seq <= up_to):
                return list(known)
            return [s for s in known if s.first_seq <= up_to]

    def infos_from(self, run_id: str, number: int) -> list[SegmentInfo]:
        """All segments but the first `number`, in order. Costs what is new, and what it gives."""
        with self._lock:
            known = self._known.setdefault(run_id, [])
            last = known[-1].last_seq if known else 0
            with self._catalog.read() as connection:
                known += segments_after(connection, run_id, last)
            return known[number:]

    def forget(self, run_id: str) -> None:
        """Look the segments of a run up again: this process has moved or retired some."""
        with self._lock:
            self._known.pop(run_id, None)

    def open(
        self, segment: SegmentInfo, *, verify: bool = True, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The rows of a segment, in its own layout; see SegmentReader.open.

        Raises:
            NoLongerKept: retention has retired them.
            SegmentMissing, Corrupt, IncompatibleFormat: as SegmentReader.open.
        """
        while segment.file is not None:
            try:
                return self._files.open(
                    segment.file, segment.kind, segment.layout, verify=verify, columns=columns
                )
            except SegmentMissing:
                now = self._look_up(segment)
                if now.file == segment.file:
                    raise
                segment = now
        raise self._gone(segment)

    def _look_up(self, segment: SegmentInfo) -> SegmentInfo:
        with self._catalog.read() as connection:
            (now,) = segments_after(
                connection, segment.run_id, segment.first_seq - 1, up_to=segment.first_seq
            )
        with self._lock:
            known = self._known.get(segment.run_id, [])
            for place, s in enumerate(known):
                if s.first_seq == now.first_seq:
                    known[place] = now
        return now

    def _gone(self, segment: SegmentInfo) -> Exception:
        query = sa.select(t.tombstones.c.seq).where(
            t.tombstones.c.run_id == segment.run_id, t.tombstones.c.first_seq == segment.first_seq
        )
        with self._catalog.read() as connection:
            seq = connection.execute(query).scalar()
        on = f"run {segment.run_id!r}, {segment.kind}, seq {segment.first_seq}"
        if seq is None:
            return SegmentMissing(
                explain(
                    "the catalog does not say where the rows of a segment lie",
                    on=on,
                    expected="a location, or an event that retired them",
                    found="neither",
                    do="see what else is wrong: ledger verify",
                )
            )
        return NoLongerKept(
            explain(
                "the rows of a segment are no longer kept",
                on=on,
                found=f"retired by the event rows_retired at seq {seq}, which names the rule",
                do="everything else that was recorded can still be asked; what needs these rows, "
                "such as replaying these steps, cannot be done any more (unless a copy of the "
                "ledger from before has them)",
            )
        )
