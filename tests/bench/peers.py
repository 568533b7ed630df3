"""The same tokens and log-probs by the habits of today, and by the ledger, in the same turns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger import open_ledger
from ledger.events import SegmentGenerated
from tests.bench.figures import Figure, Timing, interleaved
from tests.bench.peer_formats import PEERS, Peer
from tests.bench.samples import RUN, emptied, generated, new_ledger, write_durably
from tests.bench.scans import scan_into_torch

__all__ = ["peer_figures"]

GROUP = "today's habits, same data"
_OURS = "this ledger"


def peer_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Write and sync, then read into torch, against the bare bytes of the arrays."""
    events = generated((1 if quick else 4) << 20)
    bare = [np.concatenate([e.tokens for e in events]).tobytes()]
    bare.append(np.concatenate([e.rollout_log_probs for e in events]).tobytes())
    size = sum(len(piece) for piece in bare)
    repetitions = 1 if quick else 3
    peers = {peer.name: peer for peer in PEERS if peer.installed}
    written = _writes(folder, peers, events, bare, repetitions)
    read = _reads(folder, peers, bare, size // 4, repetitions)
    for what, against, times in (
        ("write", "write + fsync of the bare arrays", written),
        ("read", "warm read() of the bare arrays", read),
    ):
        for name in (_OURS, *peers):
            one = times[name]
            stored = sum(f.stat().st_size for f in (folder / _file(name)).rglob("*") if f.is_file())
            yield Figure(
                group=GROUP,
                name=f"{what}: {name}",
                against=against,
                ratio=times["raw"].seconds / one.seconds,
                mb_per_s=size / 1e6 / one.seconds,
                mb_per_cpu_s=size / 1e6 / one.cpu_seconds,
                note=f"{one.seconds * 1e3:.0f} ms against {times['raw'].seconds * 1e3:.1f} for "
                f"{size / 1e6:.0f} MB" + (f"; file {stored / size:.2f} ×" if name in peers else ""),
                details={"peer_s": one.seconds, "raw_s": times["raw"].seconds},
            )
    for peer in PEERS:
        if not peer.installed:
            note = f"not installed: pip install {peer.package}"
            yield Figure(group=GROUP, name=peer.name, against="", ratio=None, note=note)


def _writes(
    folder: Path,
    peers: dict[str, Peer],
    events: Sequence[SegmentGenerated],
    bare: Sequence[bytes],
    repetitions: int,
) -> dict[str, Timing]:
    raw = emptied(folder / "raw")
    number = itertools.count()
    with new_ledger(emptied(folder / _file(_OURS))) as (_, writer):
        writes: dict[str, Callable[[], Any]] = {
            "raw": lambda: write_durably(raw, f"{next(number)}", bare),
            _OURS: lambda: writer.append(events),
        }
        for name, peer in peers.items():
            writes[name] = lambda peer=peer: _synced(folder / _file(peer.name), peer, events)  # type: ignore[misc]
        return interleaved(writes, repetitions)


def _reads(
    folder: Path, peers: dict[str, Peer], bare: Sequence[bytes], values: int, repetitions: int
) -> dict[str, Timing]:
    raw = write_durably(folder / "raw", "bare", bare)
    with open_ledger(folder / _file(_OURS)) as ledger:
        first = ledger.segment_infos(RUN)
        head = next(s.last_seq for s in first if s.kind == "segment_generated")

    def ours() -> int:
        with open_ledger(folder / _file(_OURS)) as ledger:
            return scan_into_torch(ledger.reader(RUN, as_of=head))

    reads: dict[str, Callable[[], Any]] = {"raw": raw.read_bytes, _OURS: ours}
    for name, peer in peers.items():
        reads[name] = lambda peer=peer: peer.read(folder / _file(peer.name))  # type: ignore[misc]
    for name, read in reads.items():
        if name != "raw" and (found := read()) != values:
            raise RuntimeError(f"{name}: {found} values came back, {values} were written")
    return interleaved(reads, repetitions)


def _file(name: str) -> str:
    return name.split(",")[0].replace(" ", "-")


def _synced(folder: Path, peer: Peer, events: Sequence[SegmentGenerated]) -> None:
    """With the same discipline as everything else: most formats do not sync by themselves."""
    peer.write(emptied(folder), events)
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
