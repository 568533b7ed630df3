"""Keeping a ledger: checks, compaction, collection, a new catalog; against the bare work.

For orientation: none of it stands in the way of a training, and none has a goal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from ledger import open_ledger
from ledger.collect import collect, plan_collection
from ledger.compact import compact, plan_compaction
from ledger.place import place_of
from ledger.rebuild_catalog import rebuild_catalog
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from tests.bench.figures import Figure, Timing, interleaved
from tests.bench.mismatch import write_training
from tests.bench.samples import RUN, emptied, linked_copy, new_ledger, scored, write_durably

__all__ = ["keeping_figures"]

GROUP = "keeping a ledger"


def keeping_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Verify and compact large segments; a new catalog and less garbage of many small ones."""
    repetitions = 1 if quick else 3
    large = folder / "large"
    write_training(emptied(large), 1 if quick else 4, 1 << 17)
    yield _verified(large, repetitions)
    yield _compacted(large, folder, repetitions)
    small, commits = emptied(folder / "small"), 50 if quick else 500
    with new_ledger(small) as (_, writer):
        for number in range(commits):
            writer.append([scored(number)])
    yield _rebuilt(small, folder, commits, repetitions)
    yield _collected(small, folder, repetitions)


def _verified(root: Path, repetitions: int) -> Figure:
    files = sorted(root.rglob("*.arrow"))
    with open_ledger(root) as ledger:
        times = interleaved(
            {
                "raw": lambda: [blake3(file.read_bytes()).digest() for file in files],
                "ledger": lambda: verify_ledger(ledger),
            },
            repetitions,
        )
    size = sum(file.stat().st_size for file in files)
    return _figure("verify", "reading and hashing the files", times, size, "hashes the content too")


def _compacted(root: Path, folder: Path, repetitions: int) -> Figure:
    copies = iter([linked_copy(root, folder / f"hot-{n}") for n in range(repetitions + 1)])
    files = sorted(root.rglob("*.arrow"))
    raw = emptied(folder / "raw")

    def compacted() -> None:
        with open_ledger(next(copies)) as ledger:
            compact(ledger, plan_compaction(ledger))

    times = interleaved(
        {
            "raw": lambda: [write_durably(raw, f.name, [f.read_bytes()]) for f in files],
            "ledger": compacted,
        },
        repetitions,
    )
    size = sum(file.stat().st_size for file in files)
    note = "encodes as Parquet, reads it back and hashes its content"
    return _figure("compact", "reading and writing the files, synced", times, size, note)


def _rebuilt(small: Path, folder: Path, commits: int, repetitions: int) -> Figure:
    copy = linked_copy(small, folder / "copy")
    files = sorted(copy.rglob("*.arrow"))
    place = place_of(LocalStore(copy), None)
    times = interleaved(
        {
            "raw": lambda: [blake3(file.read_bytes()).digest() for file in files],
            "ledger": lambda: rebuild_catalog(place, force=True),
        },
        repetitions,
    )
    with open_ledger(copy) as ledger:
        found = ledger.run(RUN).head_seq
    with open_ledger(small) as ledger:
        wanted = ledger.run(RUN).head_seq
    if found != wanted:
        raise RuntimeError(f"a rebuilt catalog ends at seq {found}, the ledger at {wanted}")
    size = sum(file.stat().st_size for file in files)
    rate = f"{commits / times['ledger'].seconds:,.0f} commits of one event a second"
    return _figure("rebuild-catalog", "reading and hashing the files", times, size, rate)


def _collected(small: Path, folder: Path, repetitions: int) -> Figure:
    copies = [linked_copy(small, folder / f"sealed-{n}") for n in range(repetitions + 1)]
    for copy in copies:
        with open_ledger(copy) as ledger:
            compact(ledger, plan_compaction(ledger))
            garbage = plan_collection(ledger, grace_s=0).garbage
    bare = [emptied(folder / f"bare-{n}") for n in range(repetitions + 1)]
    for target in bare:
        for n, file in enumerate(garbage):
            os.link(copies[0] / file.path, target / f"{n}")
    ledgers, folders = iter(copies), iter(bare)

    def unlinked() -> None:
        for file in next(folders).iterdir():
            file.unlink()

    def collected() -> None:
        with open_ledger(next(ledgers)) as ledger:
            collect(ledger, plan_collection(ledger, grace_s=0), grace_s=0)

    times = interleaved({"raw": unlinked, "ledger": collected}, repetitions)
    size = sum(file.size_bytes for file in garbage)
    rate = f"{len(garbage) / times['ledger'].seconds:,.0f} files a second, each removal synced"
    return _figure("garbage collection", "unlinking the files, unsynced", times, size, rate)


def _figure(
    name: str, against: str, times: dict[str, Timing], size_bytes: int, note: str
) -> Figure:
    raw, one = times["raw"], times["ledger"]
    return Figure(
        group=GROUP,
        name=f"{name}, {size_bytes / 1e6:.1f} MB",
        against=against,
        ratio=raw.seconds / one.seconds,
        mb_per_s=size_bytes / 1e6 / one.seconds if size_bytes >= 1e6 else None,
        mb_per_cpu_s=size_bytes / 1e6 / one.cpu_seconds if size_bytes >= 1e6 else None,
        note=f"{one.seconds * 1e3:.0f} ms against {raw.seconds * 1e3:.0f}; {note}",
        details={"ledger_s": one.seconds, "raw_s": raw.seconds, "size_bytes": size_bytes},
    )
