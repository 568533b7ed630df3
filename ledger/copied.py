"""A ledger's folder that was copied while it was written: it opens at a committed point.

Whoever copies a folder file by file gets each file as it was at another moment: the catalog may be
torn, may lack commits whose links and segments were copied after it, and may tell of commits whose
segments were copied before those were there, or wholly there. `catalog.place` says which file the
catalog is, so that a copy is known for one; its commits are then compared with what is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

import sqlalchemy as sa

import migrations
from ledger.catalog import queries
from ledger.catalog import tables as t
from ledger.catalog.copies import copy_to_file, new_memory, rows_to_memory
from ledger.catalog.engine import Catalog
from ledger.catalog.integrity import catalog_differences
from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, IncompatibleFormat, LedgerError, NotFound, StorageFailed, explain
from ledger.hashing import GENESIS, chain_link, idempotency_key
from ledger.mark import read_mark
from ledger.migrate import note_runs
from ledger.place import FORMAT, Place, locked
from ledger.rebuild import fill, read_store
from ledger.storage import ObjectStore

__all__ = ["note_if_new", "settle", "was_copied"]

_LOG = logging.getLogger("ledger.copied")

_SLACK_US = 60_000_000
"""A listing that takes a while may have an entry and lack an older one."""


def _note(file: Path) -> Path:
    return file.with_suffix(".place")


def _here(file: Path) -> str:
    found = os.stat(file)
    return f"{found.st_dev}:{found.st_ino}"


def _is_elsewhere(file: Path) -> bool:
    try:
        return _note(file).read_bytes() != _here(file).encode()
    except OSError:
        return False  # nothing was noted, as of ledgers made before


def was_copied(file: Path) -> bool:
    """Whether the catalog is a copy of one that was in use; to be asked before it is opened.

    Who closes a ledger last takes SQLite's log away. A copy without one is of a ledger at rest:
    what is missing there is no torn end, but a loss, and shows as one.
    """
    logs = (Path(f"{file}{rest}") for rest in ("-wal", "-shm"))
    return _is_elsewhere(file) and any(log.exists() for log in logs)


def note_place(file: Path) -> None:
    """Note which file the catalog is. Raises: OSError."""
    note = _note(file)
    temporary = note.with_name(f"{note.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
    temporary.write_text(_here(file))
    temporary.replace(note)


def note_if_new(file: Path) -> None:
    """Note which file the catalog is, where that is new. Raises: StorageFailed."""
    if _note(file).exists() and not _is_elsewhere(file):
        return
    try:
        note_place(file)
    except OSError as error:
        raise StorageFailed(
            explain("a ledger was not opened for writing", on=str(file), found=str(error))
        ) from error


def settle(place: Place, live: Catalog) -> Catalog:
    """The catalog of a copied folder at a committed point; `live` is closed if it is another one.

    Where nothing is missing, it is `live`. Else one is made in memory; where `live` may be written,
    it takes the place of the torn one, which stays beside it under another name. What was left out
    is logged.

    Raises:
        Corrupt: what is missing is no end of the run, or too little is there to go by.
        StorageFailed: the place cannot be read, or not be written.
    """
    file = place.file
    if file is None:
        raise ValueError("not an SQLite file")
    with contextlib.ExitStack() as stack:
        if live.refusal is None:
            stack.enter_context(locked(place))
            if not _is_elsewhere(file):
                return live  # another process was faster
        try:
            with live.read() as connection:
                older = migrations.current(connection) not in (None, migrations.HEAD)
            problem = None if older else _torn(live, place.store)
        except (Corrupt, IncompatibleFormat) as error:
            problem = " ".join(str(error).split())
        if problem is None:
            if live.refusal is None:
                _adopt(place, file, live)
            return live
        made = _committed_point(place, live, problem)
        if live.refusal is not None:
            made.refusal = live.refusal
            live.close()
            return made
        live.close()
        try:
            _install(place, file, made)
        finally:
            made.close()
        settled = Catalog(place.url)
        try:
            _adopt(place, file, settled)
        except BaseException:
            settled.close()
            raise
        return settled


def _adopt(place: Place, file: Path, catalog: Catalog) -> None:
    """Write what may not have been copied of runs and epochs; note the place."""
    with catalog.read() as connection:
        if migrations.current(connection) == migrations.HEAD:
            meta = sa.select(t.meta.c.value).where(t.meta.c.key == "ledger_id")
            note_runs(connection, place.store, str(connection.execute(meta).scalar()))
    note_place(file)


def _torn(catalog: Catalog, store: ObjectStore) -> str | None:
    """What is wrong with a copied catalog, in words; None where all is there."""
    for what, _, found in catalog_differences(catalog):
        return f"the database: {what}: {found}"
    with catalog.read() as connection:
        for run in queries.list_runs(connection):
            segments = queries.segments_after(connection, run.run_id, 0)
            problem = _broken(connection, run.run_id, segments)
            if problem is not None:
                return problem
            there = set(store.list(f"runs/{run.run_id}"))
            whole = _whole(store, segments)
            for s in segments:
                if s.file is not None and s.file.path not in whole:
                    return f"run {run.run_id!r}, {s.kind} at seq {s.first_seq}: its file is missing"
            last = max((_span(path)[1] for path in there), default=0)
            if last > run.head_seq:
                return f"run {run.run_id!r}: links tell of commits up to seq {last}, it does not"
            exported = connection.execute(
                sa.select(t.exports.c.last_seq).where(t.exports.c.run_id == run.run_id)
            ).scalar()
            reach = 0
            for first, last in sorted(_span(path) for path in there):
                reach = max(reach, last) if first <= reach + 1 else reach
            if reach < (exported or 0):
                return f"run {run.run_id!r}: links from seq {reach + 1} on are missing"
    return None


def _whole(store: ObjectStore, segments: list[SegmentInfo]) -> set[str]:
    """The files of the segments that are there with all their bytes.

    A small file that was copied in the moment of its writing may have some of them only.
    """
    sizes = {s.file.path: s.file.size_bytes for s in segments if s.file is not None}
    found = set()
    for path, size_bytes in sizes.items():
        with contextlib.suppress(NotFound):
            if store.stamp(path).size_bytes == size_bytes:
                found.add(path)
    return found


def _span(path: str) -> tuple[int, int]:
    """First and last seq that an object of links tells of; 0 and 0 for other objects."""
    folder, _, name = path.rpartition("/")
    first, _, last = name.removesuffix(".json").partition("-")
    if not folder.endswith("/links") or not first.isdecimal() or not last.isdecimal():
        return 0, 0
    return int(first), int(last)


def _broken(connection: sa.Connection, run_id: str, segments: list[SegmentInfo]) -> str | None:
    """Where the chain of a run's rows does not hold; None where it does."""
    rows = connection.execute(sa.select(t.commits).where(t.commits.c.run_id == run_id))
    commits = {row.first_seq: row for row in rows}
    chain, seq = GENESIS, 1
    for s in segments:
        c = commits.get(s.commit_seq)
        if c is None or s.first_seq != seq:
            return f"run {run_id!r}: no commit at seq {seq}"
        key = idempotency_key(c.branch, c.producer, c.epoch, c.producer_seq)
        chain = chain_link(chain, seq, s.kind, s.rows, s.logical_hash, key)
        if chain != s.chain:
            return f"run {run_id!r}: the chain breaks at seq {seq}"
        seq += s.rows
    head = connection.execute(sa.select(t.runs).where(t.runs.c.run_id == run_id)).one()
    if (head.head_seq, bytes(head.head_chain)) != (seq - 1, chain):
        return f"run {run_id!r}: its head is not its last commit"
    return None


def _committed_point(place: Place, live: Catalog, problem: str) -> Catalog:
    """A catalog in memory: of the copied one if its rows are sound, else of the links."""
    made = _from_rows(live, place.store) or _from_links(place, live.name, problem)
    try:
        with made.write() as connection:
            for run in queries.list_runs(connection):
                segments = queries.segments_after(connection, run.run_id, 0)
                keep = _present(connection, place.store, run.run_id, segments)
                _cut(connection, run.run_id, keep)
                # All links are written again: some may not have been copied.
                connection.execute(t.exports.delete().where(t.exports.c.run_id == run.run_id))
                kept = [s for s in segments if s.last_seq <= keep]
                wrong = _broken(connection, run.run_id, kept)
                if wrong is not None:
                    raise _lost(place, wrong)
                _LOG.warning(
                    "%s was copied while it was written (%s): run %r opens at seq %d",
                    place.store.uri,
                    problem,
                    run.run_id,
                    keep,
                )
    except BaseException:
        made.close()
        raise
    return made


def _from_rows(live: Catalog, store: ObjectStore) -> Catalog | None:
    """The rows of the copied catalog; None where they are torn, or links know more."""
    try:
        if catalog_differences(live):
            return None
        with live.read() as connection:
            for run in queries.list_runs(connection):
                there = set(store.list(f"runs/{run.run_id}"))
                segments = queries.segments_after(connection, run.run_id, 0)
                behind = max((_span(path)[1] for path in there), default=0) > run.head_seq
                whole = _whole(store, segments)
                sealed = any(
                    s.file is not None and s.file.path not in whole and "/hot/" not in s.file.path
                    for s in segments
                )
                if behind or sealed or _broken(connection, run.run_id, segments) is not None:
                    return None
            url, let_go = rows_to_memory(connection, migrations.HEAD)
    except (Corrupt, IncompatibleFormat):
        return None
    return Catalog(url, name=live.name, on_close=let_go)


def _from_links(place: Place, name: str, problem: str) -> Catalog:
    mark = read_mark(place.store)
    report = read_store(place.store, None if mark is None else mark.ledger_id)
    if report.ledger_id is None:
        raise _lost(place, problem)
    url, let_go = new_memory()
    made = Catalog(url, name=name, on_close=let_go)
    try:
        with made.write() as connection:
            migrations.upgrade(connection)
            fill(connection, report)
            meta = {"format": str(FORMAT), "ledger_id": report.ledger_id}
            rows = [{"key": key, "value": value} for key, value in meta.items()]
            connection.execute(t.meta.insert(), rows)
    except BaseException:
        made.close()
        raise
    return made


def _present(
    connection: sa.Connection, store: ObjectStore, run_id: str, segments: list[SegmentInfo]
) -> int:
    """The last seq of the longest row of commits whose files are all there.

    Raises:
        Corrupt: files of a kind are missing with later ones of it there: that is no torn end.
    """
    rows = connection.execute(sa.select(t.commits).where(t.commits.c.run_id == run_id))
    at = {row.first_seq: row.committed_at for row in rows}
    retired = set(
        connection.execute(
            sa.select(t.tombstones.c.first_seq).where(t.tombstones.c.run_id == run_id)
        ).scalars()
    )
    there = _whole(store, segments)
    missing: dict[str, SegmentInfo] = {}
    keep: int | None = None
    for s in segments:
        here = s.first_seq in retired or (s.file is not None and s.file.path in there)
        first = missing.get(s.kind)
        if not here:
            missing.setdefault(s.kind, s)
            keep = s.commit_seq - 1 if keep is None else keep
        elif first is not None and at[s.commit_seq] > at[first.commit_seq] + _SLACK_US:
            raise Corrupt(
                explain(
                    "a copied ledger was not opened: files are missing in the middle of a run",
                    on=f"run {run_id!r}, {first.kind} at seq {first.first_seq}",
                    expected=None if first.file is None else first.file.path,
                    found=f"no such file, but later ones, such as that at seq {s.first_seq}",
                    do="copy the folder again; see what is missing: ledger verify",
                )
            )
    if keep is not None:
        return keep
    return segments[-1].last_seq if segments else 0


def _cut(connection: sa.Connection, run_id: str, keep: int) -> None:
    """Leave out all commits of a run after the one that ends at `keep`."""
    run = connection.execute(sa.select(t.runs).where(t.runs.c.run_id == run_id)).one()
    if run.head_seq == keep:
        return
    tombs = sa.select(t.tombstones).where(
        t.tombstones.c.run_id == run_id, t.tombstones.c.seq > keep
    )
    if connection.execute(tombs).first() is not None:
        raise Corrupt(
            explain(
                "a copied ledger was not opened: it was copied while rows were retired",
                on=f"run {run_id!r}",
                do="copy the folder again",
            )
        )
    for table, column in (
        (t.locations, "first_seq"),
        (t.segments, "first_seq"),
        (t.commits, "first_seq"),
        (t.versions, "seq"),
        (t.consumption, "seq"),
        (t.branches, "seq"),
    ):
        connection.execute(table.delete().where(table.c.run_id == run_id, table.c[column] > keep))
    chain = connection.execute(
        sa.select(t.commits.c.chain).where(
            t.commits.c.run_id == run_id, t.commits.c.last_seq == keep
        )
    ).scalar()
    connection.execute(
        t.runs.update()
        .where(t.runs.c.run_id == run_id)
        .values(head_seq=keep, head_chain=GENESIS if chain is None else chain)
    )


def _install(place: Place, file: Path, made: Catalog) -> None:
    """Put the catalog in memory in the place of the torn one."""
    store = place.store
    with made.read() as connection:
        heads = {run.run_id: run.head_seq for run in queries.list_runs(connection)}
    new = file.with_name(f"{file.name}.settling")
    try:
        new.unlink(missing_ok=True)
        copy_to_file(made.url, new)
        aside = f"{file}.torn-{time.time_ns() // 1000}"
        # The log first: one that stayed would be read as the new file's.
        for rest in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{file}{rest}", f"{aside}{rest}")
        os.rename(new, file)
        catalog = Catalog(place.url)
        try:
            catalog.keep_write_ahead_log()
        finally:
            catalog.close()
        for run_id, head in heads.items():
            for path in list(store.list(f"runs/{run_id}/links")):
                if _span(path)[1] > head:
                    store.put([(path.replace("/links/", "/links-set-aside/", 1), store.read(path))])
                    store.delete(path)
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, LedgerError):
            raise
        raise StorageFailed(
            explain("a copied ledger was not opened", on=str(file), found=str(error))
        ) from error


def _lost(place: Place, problem: str) -> Corrupt:
    return Corrupt(
        explain(
            "a copied ledger was not opened: too little of it is there",
            on=place.store.uri,
            found=problem,
            do="copy the folder again; better, make the copy while nothing writes",
        )
    )
