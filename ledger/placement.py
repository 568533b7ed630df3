"""Where rows lie, told by the files themselves: for making the catalog again, and for collection.

A hot segment says in its metadata who wrote it. A sealed file says which segments it holds. A
segment that lies in both is taken from the sealed file, as compaction means it, if the bytes of
that are still those it was named by.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa

from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, LedgerError, explain
from ledger.hashing import file_hash
from ledger.sealed import SEALED_FORMAT, read_held
from ledger.segment import Identity, SegmentFile, read_identities
from ledger.storage import ObjectStore

__all__ = ["Placement", "StoredRun", "list_runs"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRun:
    """The objects of one run, by their folder; paths sorted."""

    run_id: str
    links: tuple[str, ...]
    producers: tuple[str, ...]
    hot: frozenset[str]
    sealed: frozenset[str]
    others: tuple[str, ...]

    def has(self, path: str) -> bool:
        """Whether a segment file is there."""
        return path in self.hot or path in self.sealed


def list_runs(store: ObjectStore) -> list[StoredRun]:
    """All runs of a store, by name, from one listing."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in store.list("runs"):
        _, run_id, *rest = path.split("/")
        folders = found.setdefault(run_id, {})
        folders.setdefault(rest[0] if len(rest) > 1 else "", []).append(path)
    known = ("links", "producers", "hot", "sealed")
    return [
        StoredRun(
            run_id=run_id,
            links=tuple(sorted(folders.get("links", ()))),
            producers=tuple(sorted(folders.get("producers", ()))),
            hot=frozenset(folders.get("hot", ())),
            sealed=frozenset(folders.get("sealed", ())),
            others=tuple(
                sorted(p for name, paths in folders.items() if name not in known for p in paths)
            ),
        )
        for run_id, folders in sorted(found.items())
        if set(folders) != {""} or any(p.endswith("/run.json") for p in folders[""])
    ]


class Placement:
    """Gives each segment its place, from one look at the files of a run."""

    def __init__(self, store: ObjectStore, stored: StoredRun) -> None:
        self._store = store
        self._stored = stored
        self.unreadable: list[tuple[str, LedgerError]] = []
        """Sealed files that could not be read, and why. They place nothing."""
        self._sealed: dict[int, SegmentFile] = {}
        self._logical: dict[int, bytes] = {}
        self._damaged: set[str] = set()
        most: dict[int, tuple[bool, int, str]] = {}
        for path in sorted(stored.sealed):
            try:
                data = store.read(path)
                held, digest = read_held(path, data), _hash_in(path)
            except LedgerError as error:
                self.unreadable.append((path, error))
                continue
            sound = file_hash(data) == digest
            if not sound:
                self._damaged.add(path)
            for part in held:
                # Of several files that hold it (two compactions at once), the one with most.
                rank = (sound, len(held), path)
                if rank > most.get(part.first_seq, (False, 0, "")):
                    most[part.first_seq] = rank
                    self._logical[part.first_seq] = part.logical_hash
                    self._sealed[part.first_seq] = SegmentFile(
                        path, SEALED_FORMAT, part.row_offset, part.rows, digest, data.size
                    )

    def place(self, segment: SegmentInfo) -> SegmentInfo:
        """The segment where its rows lie now; where the links put it if no sealed file has it.

        A sealed file that was damaged is taken only where nothing else has the rows: so that what
        is lost has a name, and the rest is there.
        """
        sealed = self._sealed.get(segment.first_seq)
        if sealed is None or sealed.rows != segment.rows:
            return segment
        if self._logical[segment.first_seq] != segment.logical_hash:
            return segment
        hot = segment.file
        if sealed.path in self._damaged and hot is not None and self._stored.has(hot.path):
            return segment
        return dataclasses.replace(segment, file=sealed)

    def left_over(
        self, segments: Iterable[SegmentInfo], named: Collection[str], retired: Collection[int]
    ) -> list[dict[str, Any]]:
        """Rows of `unreferenced`: files that links put rows in, and that no location names now."""
        now = time.time_ns() // 1000
        rows: dict[str, dict[str, Any]] = {}
        for s in segments:
            sealed = self._sealed.get(s.first_seq)
            for file in (s.file, sealed):
                if file is None or file.path in named or not self._stored.has(file.path):
                    continue
                rows[file.path] = {
                    "path": file.path,
                    "run_id": s.run_id,
                    "since": now,
                    "size_bytes": file.size_bytes,
                    "reason": "retired" if s.first_seq in retired else "compacted",
                }
        return list(rows.values())

    def unlinked(self, linked: Collection[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """(producer, epoch) → files and appends, of the hot files that no link mentions."""
        files: dict[tuple[str, int], int] = {}
        keys: dict[tuple[str, int], set[int]] = {}
        for path in sorted(self._stored.hot.difference(linked)):
            data = self._store.read(path)
            if file_hash(data).hex() != path.rpartition("/")[2].rpartition(".")[0]:
                continue  # half written by a process that was killed: never committed
            try:
                with pa.ipc.open_file(data) as opened:
                    named = [who for who, *_ in read_identities(opened.schema.empty_table())]
            except (LedgerError, pa.ArrowException, OSError, ValueError):
                named = [Identity(self._stored.run_id, "", "(unreadable)", 0, 0, 0)]
            for of in {(who.producer, who.epoch) for who in named}:
                files[of] = files.get(of, 0) + 1
            for who in named:
                keys.setdefault((who.producer, who.epoch), set()).add(who.producer_seq)
        return {of: (files[of], len(keys[of])) for of in sorted(files)}


def _hash_in(path: str) -> bytes:
    name = path.rpartition("/")[2].removesuffix(".parquet")
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise Corrupt(
            explain(
                "a sealed file is not named by its hash",
                on=path,
                expected="64 hexadecimal digits and .parquet",
            )
        )
    return digest
