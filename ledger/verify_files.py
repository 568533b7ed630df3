"""Reading segment files again, many at once; what is found is small, whatever the files are."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa

from ledger.appending import content_part
from ledger.catalog.derive import Derived, derive, ranges_of
from ledger.catalog.records import SegmentInfo
from ledger.encode import events_of
from ledger.errors import Corrupt, IncompatibleFormat, NotFound, StorageFailed
from ledger.events import CheckpointSaved
from ledger.hashing import column_digests, digest_of_columns
from ledger.sealed import SEALED_FORMAT, Held, read_held
from ledger.segment import HOT_FORMAT, Identity, read_identities
from ledger.segment_reader import SegmentReader
from ledger.storage import ObjectStore

__all__ = ["Outcome", "by_file", "check_file", "in_parallel"]

_KEEP_BYTES = 64 << 20
"""What one file's check keeps of what it decoded: a row group."""

Difference = tuple[str, object, object]
"""What, expected, found."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What reading one segment told."""

    differences: tuple[Difference, ...]
    content_part: str | None
    """Its part of the content hash of its commit; None where it could not be read."""
    derived: Derived | None
    """What the catalog keeps of its events, counted from its own first row."""
    checkpoints: tuple[CheckpointSaved, ...]


def by_file(segments: Iterable[SegmentInfo]) -> list[list[SegmentInfo]]:
    """The segments by the file that they lie in, each file's in order; without those of no file."""
    files: dict[str, list[SegmentInfo]] = {}
    for s in segments:
        if s.file is not None:
            files.setdefault(s.file.path, []).append(s)
    return list(files.values())


def check_file(
    store: ObjectStore, segments: Sequence[SegmentInfo], wrote: Mapping[int, Identity]
) -> list[tuple[SegmentInfo, Outcome]]:
    """Read one file: its hash, and of each of its segments the rows, by their logical hash.

    `wrote` says who must have written a segment, by its first seq. Nothing is raised for what is
    found.
    """
    # It remembers nothing of other files: every file is read again.
    reader = SegmentReader(store, _KEEP_BYTES)
    held: list[Held] | None = None
    first = segments[0].file
    if first is not None and first.format == SEALED_FORMAT:
        try:
            held = read_held(first.path, store.read(first.path))
        except (Corrupt, NotFound, StorageFailed):
            held = []  # opening it below says what is wrong
    return [(s, _check(reader, s, wrote.get(s.first_seq), held)) for s in segments]


def _check(
    reader: SegmentReader, s: SegmentInfo, wrote: Identity | None, held: list[Held] | None
) -> Outcome:
    if s.file is None:
        return Outcome((), None, None, ())
    try:
        table = reader.open(s.file, s.kind, s.layout)
        size = reader.size(s.file)
    except (Corrupt, IncompatibleFormat, StorageFailed, NotFound) as error:
        return Outcome((_said(error),), None, None, ())
    wrong: list[Difference] = []

    def same(what: str, expected: object, found: object) -> None:
        if expected != found:
            wrong.append((what, expected, found))

    same("its number of rows", s.rows, table.num_rows)
    same("its size in bytes", s.file.size_bytes, size)
    digests = column_digests(table)
    logical = digest_of_columns(s.kind, s.layout, table.num_rows, digests)
    same("its logical hash", s.logical_hash, logical)
    same("the ranges of its columns", dict(s.ranges), ranges_of(table))
    if s.file.format == HOT_FORMAT and wrote is not None:
        expected = [(wrote, s.file.row_offset, s.rows)]
        named = [who for who in _identities(table) if who[1] == s.file.row_offset]
        same("who wrote it", expected, named)
    if held is not None:
        this = Held(s.first_seq, s.rows, s.file.row_offset, s.logical_hash)
        if this not in held:
            wrong.append(("what its file says it holds", this, "not that"))
    saved = events_of(table, CheckpointSaved) if s.kind == CheckpointSaved.KIND else []
    return Outcome(
        tuple(wrong),
        content_part(s.kind, s.layout, table.num_rows, digests),
        derive({s.kind: table}),
        tuple(saved),
    )


def _identities(table: pa.Table) -> list[tuple[Identity, int, int]]:
    try:
        return read_identities(table)
    except Corrupt:
        return []


def _said(error: Exception) -> Difference:
    what, *sides = str(error).splitlines()
    said = dict(line.strip().partition(":")[::2] for line in sides)
    return (
        what.split(":")[0],
        said.get("expected", "").strip(),
        said.get("found", "").strip(),
    )


_T = TypeVar("_T")


def in_parallel(tasks: Iterable[Callable[[], _T]], threads: int | None = None) -> Iterator[_T]:
    """The results in order. Few tasks are begun ahead, so that memory stays bounded."""
    threads = threads or min(8, os.cpu_count() or 1)
    pending: collections.deque[Future[_T]] = collections.deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ledger-verify") as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(task))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
