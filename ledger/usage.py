"""What a ledger takes on disk, by kind, by weight version and by run, and what it will take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import sqlalchemy as sa

from ledger.catalog import tables as t
from ledger.catalog.queries import ancestry, list_branches, list_versions
from ledger.catalog.records import SegmentInfo
from ledger.encode import events_of
from ledger.errors import NoLongerKept
from ledger.events import CheckpointSaved, RoutingRecorded, SegmentGenerated
from ledger.retention import Rule, plan_retention
from ledger.sealed import SEALED_FORMAT, SealedWriter

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["RECENT_VERSIONS", "Forecast", "Share", "Usage", "measure_usage"]

RECENT_VERSIONS = 10
"""Weight versions that a forecast goes by, and whose routing the retention that is shown keeps."""

_TRIED_BYTES = 8 << 20
"""Of each kind so many hot bytes are sealed in memory, to tell what compaction would save."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The bytes of some segments; a file of several segments is shared among them by rows."""

    name: str
    segments: int
    rows: int
    hot_bytes: int
    sealed_bytes: int
    retired_rows: int

    @property
    def size_bytes(self) -> int:
        """Hot and sealed."""
        return self.hot_bytes + self.sealed_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What the next weight versions will add, if they are as the newest ones were."""

    versions: int
    """How many versions ahead."""
    by: int
    """By how many versions it goes: the newest."""
    hot_bytes: int
    """Of segments, if none is sealed."""
    sealed_bytes: int
    """Of segments, if all are sealed."""
    checkpoint_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What there is, and what may come. All sizes in bytes."""

    by_kind: tuple[Share, ...]
    by_version: tuple[Share, ...]
    """What was recorded while a version was the newest one on its branch."""
    by_run: tuple[Share, ...]
    checkpoints: int
    """Checkpoints recorded."""
    checkpoint_bytes: int
    """Of all that were recorded, whether they are still there or not."""
    unreferenced_bytes: int
    """Files that wait for `ledger gc`."""
    tokens: int
    """Sampled tokens whose rows are kept."""
    core_bytes_per_token: float | None
    """Everything but routing and checkpoints. None where there are no tokens."""
    routing_bytes_per_token: float | None
    sealed_ratio: float | None
    """Sealed size to hot size, measured on a part of what is hot. None where nothing is."""
    compaction_saves: int
    """By that ratio, if all that is hot were sealed."""
    retention_saves: int
    """If only the routing of the newest versions (RECENT_VERSIONS) were kept."""
    forecast: Forecast | None

    @property
    def size_bytes(self) -> int:
        """All segments."""
        return sum(share.size_bytes for share in self.by_kind)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return dataclasses.asdict(self) | {"size_bytes": self.size_bytes}

    def lines(self, by: str) -> list[str]:
        """For a reader, by 'kind', 'version' or 'run'."""
        shares = {"kind": self.by_kind, "version": self.by_version, "run": self.by_run}[by]
        width = max((len(s.name) for s in shares), default=0)
        made = [
            f"{s.name:<{width}}  {_size(s.size_bytes):>9}  hot {_size(s.hot_bytes):>9}  "
            f"sealed {_size(s.sealed_bytes):>9}  {s.rows:>10} rows  {s.segments:>7} segments"
            + (f"  {s.retired_rows} rows retired" if s.retired_rows else "")
            for s in shares
        ]
        made.append(f"segments: {_size(self.size_bytes)}")
        made.append(f"checkpoints: {self.checkpoints}, {_size(self.checkpoint_bytes)} recorded")
        if self.unreferenced_bytes:
            made.append(f"waiting for ledger gc: {_size(self.unreferenced_bytes)}")
        if self.tokens:
            made.append(
                f"bytes per sampled token ({self.tokens:,} tokens): "
                f"{self.core_bytes_per_token or 0:.1f}, and routing "
                f"{self.routing_bytes_per_token or 0:.1f}"
            )
        if self.sealed_ratio is not None:
            made.append(
                f"ledger compact would save about {_size(self.compaction_saves)} "
                f"(sealed {self.sealed_ratio:.2f} × hot, tried on a part)"
            )
        if self.retention_saves:
            made.append(
                f"ledger retain --kind {RoutingRecorded.KIND} --keep-versions {RECENT_VERSIONS} "
                f"would save {_size(self.retention_saves)}"
            )
        if self.forecast is not None:
            f = self.forecast
            made.append(
                f"the next {f.versions} versions (as the last {f.by}): {_size(f.hot_bytes)} hot, "
                f"{_size(f.sealed_bytes)} once sealed, and {_size(f.checkpoint_bytes)} of "
                "checkpoints"
            )
        return made


def measure_usage(
    ledger: Ledger, run_id: str | None = None, *, forecast: int | None = None
) -> Usage:
    """Look at one run, or all; `forecast` weight versions ahead.

    Reads the catalog, the lengths of all sampled tokens, and a part of what is hot, to seal it in
    memory. Changes nothing. Raises what opening segments raises, and NotFound where there is no
    such run.
    """
    runs = [ledger.run(run_id)] if run_id is not None else ledger.runs()
    segments = {run.run_id: ledger.segment_infos(run.run_id) for run in runs}
    everything = [s for found in segments.values() for s in found]
    bytes_of = _shared_bytes(everything)
    versions: dict[tuple[str, int], str] = {}
    newest: dict[str, list[int]] = {}
    for run in runs:
        at, order = _versions_of(ledger, run.run_id)
        newest[run.run_id] = order
        prefix = "" if len(runs) == 1 else f"{run.run_id} "
        for s in segments[run.run_id]:
            version = at(s)
            versions[s.run_id, s.first_seq] = (
                f"{prefix}{'none yet' if version is None else version}"
            )
    by_kind = _shares(everything, bytes_of, lambda s: s.kind)
    ratios = _sealed_ratios(ledger, everything)
    hot = sum(share.hot_bytes for share in by_kind)
    sealed_hot = sum(share.hot_bytes * ratios.get(share.name, 1.0) for share in by_kind)
    routing = sum(share.size_bytes for share in by_kind if share.name == RoutingRecorded.KIND)
    total = sum(share.size_bytes for share in by_kind)
    tokens = _tokens(ledger, everything)
    saved = _checkpoints(ledger, everything)
    recent = {
        f"{'' if len(runs) == 1 else run + ' '}{version}"
        for run, order in newest.items()
        for version in order[-RECENT_VERSIONS:]
    }
    ahead = None
    if forecast is not None:
        of_recent = [s for s in everything if versions[s.run_id, s.first_seq] in recent]
        ahead = _forecast(forecast, of_recent, bytes_of, ratios, len(recent), saved)
    return Usage(
        by_kind=by_kind,
        by_version=_shares(everything, bytes_of, lambda s: versions[s.run_id, s.first_seq]),
        by_run=_shares(everything, bytes_of, lambda s: s.run_id),
        checkpoints=len(saved),
        checkpoint_bytes=sum(saved),
        unreferenced_bytes=_unreferenced(ledger, list(segments)),
        tokens=tokens,
        core_bytes_per_token=(total - routing) / tokens if tokens else None,
        routing_bytes_per_token=routing / tokens if tokens else None,
        sealed_ratio=sealed_hot / hot if hot else None,
        compaction_saves=max(round(hot - sealed_hot), 0),
        retention_saves=_retention_saves(ledger, list(segments)),
        forecast=ahead,
    )


def _shared_bytes(segments: Iterable[SegmentInfo]) -> dict[tuple[str, int], float]:
    """(run, first seq) → the segment's bytes."""
    rows: dict[str, int] = {}
    for s in segments:
        if s.file is not None:
            rows[s.file.path] = rows.get(s.file.path, 0) + s.rows
    return {
        (s.run_id, s.first_seq): 0.0
        if s.file is None
        else s.file.size_bytes * s.rows / rows[s.file.path]
        for s in segments
    }


def _shares(
    segments: Iterable[SegmentInfo],
    bytes_of: Mapping[tuple[str, int], float],
    name_of: Callable[[SegmentInfo], str],
) -> tuple[Share, ...]:
    sums: dict[str, list[float]] = {}
    for s in segments:
        row = sums.setdefault(name_of(s), [0, 0, 0.0, 0.0, 0])
        row[0] += 1
        row[1] += s.rows
        if s.file is None:
            row[4] += s.rows
        else:
            row[3 if s.file.format == SEALED_FORMAT else 2] += bytes_of[s.run_id, s.first_seq]
    return tuple(
        Share(name, int(n), int(rows), round(hot), round(sealed), int(gone))
        for name, (n, rows, hot, sealed, gone) in sums.items()
    )


def _versions_of(
    ledger: Ledger, run_id: str
) -> tuple[Callable[[SegmentInfo], int | None], list[int]]:
    """Segment → the version that was the newest on its branch; and versions in order."""
    with ledger.catalog.read() as connection:
        versions = list_versions(connection, run_id=run_id)
        lineages = {
            b.name: dict(ancestry(connection, run_id, b.name))
            for b in list_branches(connection, run_id)
        }
    seen: dict[str, list[tuple[int, int]]] = {}
    for branch, lineage in lineages.items():
        for v in versions:
            if v.branch in lineage:
                limit = lineage[v.branch]
                if limit is None or v.seq <= limit:
                    seen.setdefault(branch, []).append((v.seq, v.weight_version))
        seen.setdefault(branch, []).sort()

    def at(s: SegmentInfo) -> int | None:
        before = [version for seq, version in seen.get(s.branch, []) if seq <= s.first_seq]
        return before[-1] if before else None

    return at, [v.weight_version for v in sorted(versions, key=lambda v: v.seq)]


def _sealed_ratios(ledger: Ledger, segments: Sequence[SegmentInfo]) -> dict[str, float]:
    """Kind → sealed to hot size, of the newest hot segments, sealed in memory."""
    ratios: dict[str, float] = {}
    newest: dict[tuple[str, str, int], list[SegmentInfo]] = {}
    for s in reversed(segments):
        if s.file is not None and s.file.format != SEALED_FORMAT:
            newest.setdefault((s.run_id, s.kind, s.layout), []).append(s)
    shared = _shared_bytes(segments)
    for (run_id, kind, layout), found in newest.items():
        writer, hot = SealedWriter(run_id, kind, layout), 0.0
        for s in found:
            if hot > _TRIED_BYTES:
                break
            try:
                writer.add(s, ledger.index.open(s))
            except NoLongerKept:
                continue
            hot += shared[s.run_id, s.first_seq]
        if hot:
            # A small file is mostly its own description: sealing gains nothing then.
            ratios[kind] = min(writer.finish().size / hot, 1.0)
    return ratios


def _tokens(ledger: Ledger, segments: Iterable[SegmentInfo]) -> int:
    total = 0
    for s in segments:
        if s.kind == SegmentGenerated.KIND and s.file is not None:
            try:
                column = ledger.index.open(s, columns=["tokens"]).column("tokens")
            except NoLongerKept:
                continue
            total += pc.sum(pc.list_value_length(column)).as_py() or 0
    return total


def _checkpoints(ledger: Ledger, segments: Iterable[SegmentInfo]) -> list[int]:
    """Bytes of each recorded checkpoint."""
    return [
        int(event.file_sizes.sum())
        for s in segments
        if s.kind == CheckpointSaved.KIND and s.file is not None
        for event in events_of(ledger.index.open(s), CheckpointSaved)
    ]


def _unreferenced(ledger: Ledger, run_ids: list[str]) -> int:
    sizes = sa.select(sa.func.sum(t.unreferenced.c.size_bytes))
    with ledger.catalog.read() as connection:
        found = connection.execute(sizes.where(t.unreferenced.c.run_id.in_(run_ids))).scalar()
    return int(found or 0)


def _retention_saves(ledger: Ledger, run_ids: Iterable[str]) -> int:
    rule = Rule(RoutingRecorded.KIND, keep_versions=RECENT_VERSIONS)
    return sum(
        group.size_bytes
        for run_id in run_ids
        for group in plan_retention(ledger, rule, run_id).groups
    )


def _forecast(
    versions: int,
    recent: Iterable[SegmentInfo],
    bytes_of: Mapping[tuple[str, int], float],
    ratios: Mapping[str, float],
    by: int,
    saved: Sequence[int],
) -> Forecast:
    hot = sealed = 0.0
    for s in recent:
        size = bytes_of[s.run_id, s.first_seq]
        ratio = ratios.get(s.kind, 1.0)
        if s.file is not None and s.file.format == SEALED_FORMAT:
            hot, sealed = hot + size / ratio, sealed + size
        else:
            hot, sealed = hot + size, sealed + size * ratio
    each = versions / max(by, 1)
    kept = saved[-by:] if by else []
    return Forecast(versions, by, round(hot * each), round(sealed * each), round(sum(kept) * each))


def _size(size_bytes: float) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
