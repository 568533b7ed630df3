"""Compaction: many hot segments of one kind become one sealed file, while writers write.

What was committed does not change, only where it lies. A file is made, stored by exclusive create
and read back, every segment against its logical hash; then one transaction of the catalog moves
the locations, where they are still what was read, and lists the old files as unreferenced. A crash
before that leaves a file that nothing names, which collection removes; a crash after it leaves
nothing to do.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.commit import lock_run
from ledger.catalog.locations import move, parts_of
from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, InvalidArgument, LedgerError, explain
from ledger.hashing import file_hash, logical_hash
from ledger.schema import require_kinds
from ledger.sealed import SEALED_FORMAT, Held, SealedWriter, sealed_folder
from ledger.segment import HOT_FORMAT, SegmentFile
from ledger.segment_reader import SegmentReader

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = [
    "TARGET_BYTES",
    "BackgroundCompaction",
    "Batch",
    "CompactReport",
    "MadeFile",
    "compact",
    "compact_in_background",
    "plan_compaction",
]

_LOG = logging.getLogger("ledger.compact")

TARGET_BYTES = 128 << 20
"""Size from which on a sealed file is complete."""

_KEEP_BYTES = 64 << 20
"""What reading keeps: a row group, so that its segments do not decode it again and again."""

_LONELY_BYTES = 1 << 20
"""A single segment smaller than this stays hot: sealing it alone gains nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Segments of one kind and layout of a run, by seq, that are to lie together."""

    run_id: str
    kind: str
    layout: int
    segments: tuple[SegmentInfo, ...]
    size_bytes: int
    """Of the files they lie in now."""


@dataclasses.dataclass(frozen=True, slots=True)
class MadeFile:
    """One sealed file, and what it took the place of."""

    path: str
    kind: str
    layout: int
    segments: int
    """Segments that lie in it now."""
    lost: int
    """Segments that somebody else had moved or retired meanwhile."""
    rows: int
    before_bytes: int
    after_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did, or (dry run) what it would begin with."""

    batches: tuple[Batch, ...]
    files: tuple[MadeFile, ...]
    dry_run: bool

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "dry_run": self.dry_run,
            "batches": [
                {
                    "run_id": b.run_id,
                    "kind": b.kind,
                    "layout": b.layout,
                    "segments": len(b.segments),
                    "size_bytes": b.size_bytes,
                }
                for b in self.batches
            ],
            "files": [dataclasses.asdict(f) for f in self.files],
        }

    def lines(self) -> list[str]:
        """For a reader."""
        made = [
            f"{b.kind} (layout {b.layout}): {len(b.segments)} segments, {b.size_bytes:,} bytes"
            for b in self.batches
            if self.dry_run
        ]
        for f in self.files:
            lost = f", {f.lost} moved by others meanwhile" if f.lost else ""
            made.append(
                f"{f.path}: {f.segments} segments of {f.kind}, {f.before_bytes:,} → "
                f"{f.after_bytes:,} bytes ({f.after_bytes / max(f.before_bytes, 1):.2f}){lost}"
            )
        if not self.batches:
            made.append("nothing to compact")
        elif self.dry_run:
            made.append("dry run: nothing was changed")
        return made


def plan_compaction(
    ledger: Ledger,
    run_id: str | None = None,
    kinds: Collection[str] | None = None,
    *,
    keep_hot_s: float = 0.0,
    target_bytes: int = TARGET_BYTES,
    at_least_bytes: int = 0,
) -> list[Batch]:
    """What there is to compact: hot segments committed more than `keep_hot_s` seconds ago.

    A sealed file smaller than half of `target_bytes` is taken in again once as much has gathered
    after it. Batches smaller than `at_least_bytes` are left for later.

    Raises: NotFound where there is no such run, InvalidArgument for a kind or size that is none.
    """
    require_kinds(kinds)
    if target_bytes < 1 or keep_hot_s < 0:
        raise InvalidArgument(
            explain(
                "a compaction was not planned",
                expected="a target size of 1 byte or more, and keep_hot_s from 0 on",
                found=f"{target_bytes} bytes, {keep_hot_s} s",
            )
        )
    before = time.time_ns() // 1000 - int(keep_hot_s * 1e6)
    batches: list[Batch] = []
    for run in [ledger.run(run_id)] if run_id is not None else ledger.runs():
        with ledger.catalog.read() as connection:
            segments = parts_of(connection, run.run_id)
            young = connection.execute(
                sa.select(sa.func.min(t.commits.c.first_seq)).where(
                    t.commits.c.run_id == run.run_id, t.commits.c.committed_at > before
                )
            ).scalar()
        groups: dict[tuple[str, int], list[SegmentInfo]] = {}
        for s in segments:
            old = young is None or s.first_seq < young
            if s.file is not None and old and (kinds is None or s.kind in kinds):
                groups.setdefault((s.kind, s.layout), []).append(s)
        for (kind, layout), found in sorted(groups.items()):
            chosen = _choose(found, target_bytes)
            size = _bytes_of(chosen)
            lonely = len(chosen) == 1 and size < _LONELY_BYTES
            if chosen and not lonely and size >= at_least_bytes:
                batches.append(Batch(run.run_id, kind, layout, tuple(chosen), size))
    return batches


def _choose(found: list[SegmentInfo], target_bytes: int) -> list[SegmentInfo]:
    chosen = [s for s in found if s.file is not None and s.file.format == HOT_FORMAT]
    size = _bytes_of(chosen)
    small: dict[str, list[SegmentInfo]] = {}
    for s in found:
        if s.file is not None and s.file.format == SEALED_FORMAT:
            small.setdefault(s.file.path, []).append(s)
    # The newest first: each is written again only when what follows it is as large.
    for parts in sorted(small.values(), key=lambda parts: -parts[0].first_seq):
        file = parts[0].file
        if file is not None and file.size_bytes < target_bytes / 2 and file.size_bytes <= size:
            chosen += parts
            size += file.size_bytes
    return sorted(chosen, key=lambda s: s.first_seq)


def _bytes_of(segments: Sequence[SegmentInfo]) -> int:
    return sum({s.file.path: s.file.size_bytes for s in segments if s.file}.values())


def compact(
    ledger: Ledger,
    batches: Sequence[Batch],
    *,
    target_bytes: int = TARGET_BYTES,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CompactReport:
    """Seal the batches, file by file; each file is done, durably, before the next one begins.

    `progress(done, total)` counts segments.

    Raises:
        Corrupt: a segment is not what was committed, or what was made does not read back as such.
            Locations are moved only for files that did.
        StorageFailed: the store or the catalog did not take it.
    """
    files: list[MadeFile] = []
    total, done = sum(len(b.segments) for b in batches), 0
    if not dry_run:
        ledger.require_writable()
        for batch in batches:
            for file in _seal(ledger, batch, target_bytes):
                files.append(file)
                done += file.segments + file.lost
                if progress is not None:
                    progress(done, total)
    return CompactReport(tuple(batches), tuple(files), dry_run)


def _seal(ledger: Ledger, batch: Batch, target_bytes: int) -> Iterator[MadeFile]:
    reader = SegmentReader(ledger.store, _KEEP_BYTES)
    writer, chosen = SealedWriter(batch.run_id, batch.kind, batch.layout), list[SegmentInfo]()
    for segment in batch.segments:
        file = segment.file
        if file is None:
            continue
        table = reader.open(file, segment.kind, segment.layout)
        writer.add(segment, table)
        chosen.append(segment)
        if writer.size_bytes >= target_bytes:
            yield _finish(ledger, batch, writer, chosen)
            writer, chosen = SealedWriter(batch.run_id, batch.kind, batch.layout), []
    if chosen:
        yield _finish(ledger, batch, writer, chosen)


def _finish(
    ledger: Ledger, batch: Batch, writer: SealedWriter, chosen: list[SegmentInfo]
) -> MadeFile:
    data = writer.finish()
    digest = file_hash(data)
    path = f"{sealed_folder(batch.run_id, batch.kind)}/{digest.hex()}.parquet"
    ledger.store.put([(path, data)])
    places = [
        SegmentFile(path, SEALED_FORMAT, h.row_offset, h.rows, digest, data.size)
        for h in writer.held
    ]
    _read_back(ledger, batch, places, writer.held)

    def swap(connection: sa.Connection) -> int:
        # Collection removes files under the same lock: what is there now stays until it is named.
        lock_run(connection, batch.run_id)
        ledger.store.stamp(path)
        return move(connection, list(zip(chosen, places, strict=True)), "compacted")

    moved = ledger.catalog.transact(swap)
    ledger.index.forget(batch.run_id)
    return MadeFile(
        path=path,
        kind=batch.kind,
        layout=batch.layout,
        segments=moved,
        lost=len(chosen) - moved,
        rows=writer.rows,
        before_bytes=_bytes_of(chosen),
        after_bytes=data.size,
    )


def _read_back(
    ledger: Ledger, batch: Batch, places: Sequence[SegmentFile], held: Sequence[Held]
) -> None:
    """What the store gives back must be what was committed: before any location is moved."""
    reader = SegmentReader(ledger.store, _KEEP_BYTES)
    for place, segment in zip(places, held, strict=True):
        table: pa.Table = reader.open(place, batch.kind, batch.layout)
        found = logical_hash(table)
        if found != segment.logical_hash:
            raise Corrupt(
                explain(
                    "a sealed file does not hold what was committed; nothing was moved to it",
                    on=f"{place.path}, {batch.kind} at seq {segment.first_seq}",
                    expected=f"logical hash {segment.logical_hash.hex()}",
                    found=found.hex(),
                    do="look at the hot files: ledger verify; repeat the compaction",
                )
            )


class BackgroundCompaction:
    """Compacts again and again in a thread. Use it as a context manager, or call `close`.

    A failure is logged as a warning and tried again at the next turn: the hot files are still
    there. `failures` counts them.
    """

    def __init__(self, ledger: Ledger, interval_s: float, options: dict[str, Any]) -> None:
        self.files: list[MadeFile] = []
        """What was made so far."""
        self.failures = 0
        self._ledger, self._interval_s, self._options = ledger, interval_s, options
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ledger-compact", daemon=True)
        self._thread.start()

    def __enter__(self) -> BackgroundCompaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop after the file that is being made."""
        self._stopping.set()
        self._thread.join()

    def _work(self) -> None:
        target = self._options["target_bytes"]
        while not self._stopping.is_set():
            try:
                for batch in plan_compaction(self._ledger, **self._options):
                    for file in _seal(self._ledger, batch, target):
                        self.files.append(file)
                        if self._stopping.is_set():
                            return
            except LedgerError as error:
                self.failures += 1
                _LOG.warning("a compaction was given up; it will be tried again: %s", error)
            self._stopping.wait(self._interval_s)


def compact_in_background(
    ledger: Ledger,
    run_id: str | None = None,
    kinds: Collection[str] | None = None,
    *,
    interval_s: float = 30.0,
    keep_hot_s: float = 600.0,
    target_bytes: int = TARGET_BYTES,
    at_least_bytes: int | None = None,
) -> BackgroundCompaction:
    """Compact while the ledger is in use: every `interval_s`, what is old and large enough.

    `at_least_bytes` (default: `target_bytes`) is how much must have gathered. One process should do
    it; two harm nothing but do the work twice. Close it before the ledger.
    """
    options = {
        "run_id": run_id,
        "kinds": kinds,
        "keep_hot_s": keep_hot_s,
        "target_bytes": target_bytes,
        "at_least_bytes": target_bytes if at_least_bytes is None else at_least_bytes,
    }
    return BackgroundCompaction(ledger, interval_s, options)
