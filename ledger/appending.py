"""One append on its way: from events to what the catalog is asked, alone or packed with others.

Small appends are packed: the rows of one kind of all of them are encoded, checked and hashed in one
go and lie in one file, which is synced once. Each keeps its own segments, hashes and commit. Only
kinds are packed whose checks ask nothing of the other rows of their append.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
from blake3 import blake3

from ledger.canonical import canonical_json
from ledger.catalog.derive import NOTHING_DERIVED, Derived, sliced_ranges
from ledger.catalog.records import PendingCommit, PendingSegment, Receipt
from ledger.encode import events_to_table, refuse
from ledger.encode_plain import Fill
from ledger.errors import InvalidArgument, InvalidEvent, LedgerError, explain
from ledger.fields import EVENTS, Event
from ledger.hashing import digest_of_columns, sliced_column_digests
from ledger.invariants import Lookup, check_tables
from ledger.schema import table_layout
from ledger.segment import Identity, SegmentFile, hot_folder, segment_file, serialise

__all__ = [
    "Appending",
    "Packed",
    "by_kind",
    "content_hash",
    "content_of",
    "content_part",
    "encode_append",
    "hash_packed",
    "is_packable",
    "pack",
    "pending_of",
]

_RECORDED_AT = 1000  # the field id of Event.recorded_at

_PACKABLE = frozenset(
    {
        "prompt_issued",
        "segment_generated",
        "observation_appended",
        "routing_recorded",
        "sample_scored",
        "sample_decided",
        "eval_scored",
        "indexer_recorded",
        "prompts_left_out",
        "weights_loaded",
    }
)
_PACK_UP_TO_BYTES = 1 << 19
"""Above this an append has a file of its own, which its own thread encodes and hashes."""


class Key(Protocol):
    """What a commit is made at most once under."""

    run_id: str
    branch: str
    producer: str
    epoch: int


@dataclasses.dataclass(slots=True, eq=False)
class Appending:
    """One append, from the call to its outcome."""

    writer: Key
    number: int
    """Its producer_seq."""
    events: Mapping[str, Sequence[Event]] | None = None
    """By kind: to be packed. Else `pending` is there already."""
    tables: Mapping[str, pa.Table] | None = None
    """As `events`, encoded already."""
    pending: PendingCommit | None = None
    """What is asked of the catalog; its files are durable."""
    uncertain: bool = False
    """Whether the catalog was asked: after an error it may have been committed all the same."""
    receipt: Receipt | None = None
    error: BaseException | None = None
    turn: int | None = None
    """Number of the leader that took it; None while it waits."""
    done: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Held until there is an outcome, or until its thread shall lead."""

    def identity(self, part: int) -> Identity:
        """Who wrote its segment number `part`."""
        w = self.writer
        return Identity(w.run_id, w.branch, w.producer, w.epoch, self.number, part)

    @property
    def ended(self) -> bool:
        """Whether there is an outcome."""
        return self.receipt is not None or self.error is not None

    @property
    def kinds(self) -> Sequence[str]:
        """In the order in which they follow each other."""
        return list(self.events if self.events is not None else self.tables or ())


def by_kind(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Events by kind, in the order of first appearance.

    Raises:
        InvalidArgument: there are none, or something that is no event.
    """
    groups: dict[str, list[Event]] = {}
    for item in events:
        kind = getattr(type(item), "KIND", None)
        if kind is None or EVENTS.get(kind) is not type(item):
            raise InvalidArgument(
                explain(
                    "an append was refused: it holds something that is no event",
                    expected="instances of the classes in ledger.events",
                    found=type(item).__name__,
                )
            )
        groups.setdefault(kind, []).append(item)
    if not groups:
        raise InvalidArgument(
            explain("an append was refused", expected="at least one event", found="none")
        )
    return groups


def encode_append(
    events: Sequence[Event],
    run_id: str,
    branch: str,
    *,
    recorded_at: int,
    later: list[Fill] | None = None,
) -> dict[str, pa.Table]:
    """The tables of an append to a branch, by kind in the order of first appearance.

    They share no memory with the events. `recorded_at` is in microseconds since 1970-01-01 UTC;
    `later` as in `events_to_table`.

    Raises:
        InvalidEvent: an event breaks its layout, or names another run or branch.
        InvalidArgument: there are no events, or something that is none.
    """
    tables = {
        kind: events_to_table(group, recorded_at=recorded_at, later=later)
        for kind, group in by_kind(events).items()
    }
    _require_own_names(tables, run_id, branch)
    return tables


def _require_own_names(tables: Mapping[str, pa.Table], run_id: str, branch: str) -> None:
    """Events that name their run or branch must name the one that they are written to.

    Raises: InvalidEvent.
    """
    for field, own in (("run_id", run_id), ("branch", branch)):
        for kind, table in tables.items():
            if field in table.column_names:
                for row, named in enumerate(table.column(field).to_pylist()):
                    if named != own:
                        refuse(kind, row, field, f"{own!r}, which it is written to", repr(named))
    forks = tables.get("branch_forked")
    if forks is not None and forks.num_rows > 1:
        refuse("branch_forked", 1, "branch", "one fork in an append", forks.num_rows)


def content_hash(tables: Mapping[str, pa.Table], digests: Mapping[str, dict[int, bytes]]) -> bytes:
    """What makes two appends the same: everything but the times that the writer filled in."""
    return _content_hash(
        [(kind, table_layout(t), t.num_rows, digests[kind]) for kind, t in tables.items()]
    )


def _content_hash(parts: Sequence[tuple[str, int, int, Mapping[int, bytes]]]) -> bytes:
    """As `content_hash`, of kind, layout, rows and digests of each segment."""
    return content_of([content_part(*part) for part in parts])


def content_part(kind: str, layout: int, rows: int, digests: Mapping[int, bytes]) -> str:
    """What one segment contributes to the content hash of its append."""
    kept = {field: digest for field, digest in digests.items() if field != _RECORDED_AT}
    return digest_of_columns(kind, layout, rows, kept).hex()


def content_of(parts: Sequence[str]) -> bytes:
    """The content hash of an append, from those of its segments in order."""
    return blake3(canonical_json(list(parts)).encode()).digest()


def is_packable(groups: Mapping[str, Sequence[Event] | pa.Table]) -> bool:
    """Whether an append may share files with others: its kinds, and whether it is small."""
    if not _PACKABLE.issuperset(groups):
        return False
    left = _PACK_UP_TO_BYTES
    for group in groups.values():
        if isinstance(group, pa.Table):
            left -= group.nbytes
        else:
            names = _heavy(type(group[0]).KIND)
            for item in group:
                for name in names:
                    left -= _size(getattr(item, name))
                if left < 0:
                    return False
    return left >= 0


@functools.cache
def _heavy(kind: str) -> tuple[str, ...]:
    """The fields whose values may be large."""
    return tuple(
        c.name
        for c in EVENTS[kind].COLUMNS
        if pa.types.is_list(c.type)
        or pa.types.is_large_binary(c.type)
        or pa.types.is_string(c.type)
    )


def _size(value: Any) -> int:
    """About the bytes of a value. What is no value of an event is found later."""
    found = getattr(value, "nbytes", None)
    if found is not None:
        return int(found)
    return len(value) if hasattr(value, "__len__") else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Several appends, ready to be stored: files, and who has which rows of them."""

    appends: Sequence[Appending]
    files: Sequence[tuple[str, Sequence[Any]]]
    """Path and bytes, in pieces, of each."""
    slices: Sequence[_Slices]


@dataclasses.dataclass(frozen=True, slots=True)
class _Slices:
    """The rows of one kind of several appends, as one batch."""

    kind: str
    batch: pa.RecordBatch
    bounds: Sequence[int]
    """Where the rows of each segment begin, and the last ones end."""
    owners: Sequence[int]
    """For each segment, the number of its append."""
    file: SegmentFile


def pack(appends: Sequence[Appending], lookup: Lookup) -> tuple[list[Packed], list[Appending]]:
    """Encode and check appends, as few files as can be; those that are refused get their error.

    Returns what is to be stored, and the appends in it.
    """
    try:
        packed = _pack(appends, lookup)
        return [packed], list(appends)
    except InvalidEvent as error:
        if len(appends) == 1:
            appends[0].error = error
            return [], []
    # One of them is wrong, or they are only so together: each alone.
    made: list[Packed] = []
    kept: list[Appending] = []
    for one in appends:
        try:
            made.append(_pack([one], lookup))
            kept.append(one)
        except LedgerError as error:
            one.error = error
    return made, kept


def _pack(appends: Sequence[Appending], lookup: Lookup) -> Packed:
    now = time.time_ns() // 1000
    kinds: dict[str, list[tuple[int, int]]] = {}  # append, part
    for number, one in enumerate(appends):
        for part, kind in enumerate(one.kinds):
            kinds.setdefault(kind, []).append((number, part))
    tables: dict[str, pa.Table] = {}
    bounds: dict[str, list[int]] = {}
    for kind, places in kinds.items():
        parts = [_rows_of(appends[number], kind) for number, _ in places]
        if any(isinstance(part, pa.Table) for part in parts):
            encoded = [
                part if isinstance(part, pa.Table) else events_to_table(part, recorded_at=now)
                for part in parts
            ]
            tables[kind] = pa.concat_tables(encoded).combine_chunks()
        else:
            rows = list(itertools.chain.from_iterable(parts))
            tables[kind] = events_to_table(rows, recorded_at=now)
        bounds[kind] = [0, *itertools.accumulate(len(part) for part in parts)]
    check_tables(tables, lookup)
    slices: list[_Slices] = []
    files: list[tuple[str, Sequence[Any]]] = []
    for kind, places in kinds.items():
        edges = bounds[kind]
        pieces = serialise(
            tables[kind],
            *(
                (appends[number].identity(part), edges[i + 1] - edges[i])
                for i, (number, part) in enumerate(places)
            ),
        )
        folder = hot_folder(appends[0].writer.run_id, kind)
        file = segment_file(folder, edges[-1], pieces)
        files.append((file.path, pieces))
        (batch,) = tables[kind].to_batches()
        slices.append(_Slices(kind, batch, edges, [number for number, _ in places], file))
    return Packed(appends, files, slices)


def _rows_of(one: Appending, kind: str) -> Any:
    return one.tables[kind] if one.tables is not None else (one.events or {})[kind]


def hash_packed(packed: Packed) -> None:
    """Give each append of `packed` its pending commit. It may run while the files are stored."""
    now = time.time_ns() // 1000
    parts: list[list[tuple[PendingSegment, Mapping[int, bytes]]]] = [[] for _ in packed.appends]
    for s in packed.slices:
        layout = table_layout(s.batch)
        digests = sliced_column_digests(s.batch, s.bounds)
        ranges = sliced_ranges(s.batch, s.bounds)
        for i, owner in enumerate(s.owners):
            low, high = s.bounds[i], s.bounds[i + 1]
            logical = digest_of_columns(s.kind, layout, high - low, digests[i])
            file = dataclasses.replace(s.file, row_offset=low, rows=high - low)
            segment = PendingSegment(s.kind, layout, logical, ranges[i], file)
            parts[owner].append((segment, digests[i]))
    for one, segments in zip(packed.appends, parts, strict=True):
        order = one.kinds
        segments.sort(key=lambda part: order.index(part[0].kind))
        one.pending = pending_of(
            one,
            _content_hash([(s.kind, s.layout, s.file.rows, found) for s, found in segments]),
            tuple(s for s, _ in segments),
            now,
        )


def pending_of(
    one: Appending,
    content: bytes,
    segments: tuple[PendingSegment, ...],
    committed_at: int,
    derived: Derived = NOTHING_DERIVED,
) -> PendingCommit:
    """What is asked of the catalog for an append."""
    w = one.writer
    return PendingCommit(
        run_id=w.run_id,
        branch=w.branch,
        producer=w.producer,
        epoch=w.epoch,
        producer_seq=one.number,
        content_hash=content,
        committed_at=committed_at,
        segments=segments,
        forked=derived.forked[0] if derived.forked else None,
        published=derived.published,
        consumed=derived.consumed,
        retired=derived.retired,
    )
