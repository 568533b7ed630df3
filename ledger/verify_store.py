"""Checking what lies beside the segments: links, epochs, and files that nothing names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pyarrow as pa

from ledger.errors import LedgerError, NotFound
from ledger.hashing import file_hash
from ledger.links import (
    LinkedCommit,
    epoch_object,
    last_told,
    parse_links,
    read_sealed_json,
    run_object,
    same_commit,
)
from ledger.mark import read_mark
from ledger.placement import StoredRun
from ledger.segment import read_identities
from ledger.storage import ObjectStore
from ledger.verify_run import RunState

__all__ = ["check_links", "check_unnamed", "check_waiting"]

Find = Callable[[str, str, object, object], None]

_LISTED = 5
"""Files of a note that are named."""


def check_links(
    store: ObjectStore,
    ledger_id: str,
    state: RunState,
    stored: StoredRun,
    head_now: int,
    epochs_now: Mapping[str, int],
    find: Find,
) -> list[str]:
    """Compare the links, and what is noted of run and producers, with the catalog.

    `head_now` is the run's head, and `epochs_now` the producers' epochs, read after the objects
    were listed: links beyond it are of no commit that the catalog has. Calls `find` for what
    contradicts the catalog; returns notes about what is only not written yet.
    """
    notes: list[str] = []
    run_id = state.run.run_id
    _check_run(store, ledger_id, state, find, notes)
    _check_epochs(store, state, stored, epochs_now, find)
    _check_exported(state, find)
    parts: dict[int, list[object]] = {}
    for s in state.segments:
        parts.setdefault(s.commit_seq, []).append(s)
    catalog = {c.first_seq: c for c in state.commits}
    told: set[int] = set()
    for path in stored.links:
        try:
            _, commits = parse_links(path, store.read(path))
        except NotFound:
            continue
        except LedgerError as error:
            what, _, rest = str(error).partition("\n")
            find(path, what.split(":")[0], "the links that were written", rest.strip())
            continue
        for linked in commits:
            told.add(linked.first_seq)
            row = catalog.get(linked.first_seq)
            if row is None:
                # Written after the catalog was looked at, perhaps.
                if linked.first_seq <= state.run.head_seq:
                    expected = f"a commit with chain {linked.chain.hex()}"
                    find(path, f"the commit at seq {linked.first_seq}", expected, "none")
                continue
            here = LinkedCommit(
                **{name: getattr(row, name) for name in _ROW},
                segments=tuple(parts.get(linked.first_seq, ())),  # type: ignore[arg-type]
            )
            if not same_commit(linked, here):
                find(
                    path,
                    f"the commit at seq {linked.first_seq}",
                    f"as in the catalog: {_differing(here, linked)}",
                    _differing(linked, here),
                )
    told_up_to = max(map(last_told, stored.links), default=0)
    if told_up_to > head_now:
        find(
            f"runs/{run_id}/links",
            "commits that the catalog does not have",
            f"links up to seq {head_now}",
            f"links up to seq {told_up_to}: the catalog is older than the store",
        )
    missing = [c.first_seq for c in state.commits if c.first_seq not in told]
    lost = [first for first in missing if first <= state.exported]
    if lost:
        find(
            f"runs/{run_id}/links",
            f"links of {len(lost)} commits",
            "links as the catalog says they were written (again: ledger export-links --all)",
            f"none for the commit at seq {lost[0]}" + (" and others" if len(lost) > 1 else ""),
        )
    if len(missing) > len(lost):
        notes.append(
            f"run {run_id!r}: links of {len(missing) - len(lost)} commits are not written yet; the "
            "store alone does not tell of them (now: ledger export-links)"
        )
    return notes


_ROW = (
    "run_id",
    "first_seq",
    "last_seq",
    "branch",
    "producer",
    "epoch",
    "producer_seq",
    "content_hash",
    "chain",
    "committed_at",
)


def _differing(one: LinkedCommit, other: LinkedCommit) -> str:
    """Which of the facts of a commit differ, with the first one's values."""
    names = [n for n in (*_ROW, "segments") if getattr(one, n) != getattr(other, n)]
    values = {}
    for name in names:
        value = getattr(one, name)
        if name == "segments":
            value = f"{len(value)} segments that differ"
        values[name] = value.hex() if isinstance(value, bytes) else value
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _check_run(
    store: ObjectStore, ledger_id: str, state: RunState, find: Find, notes: list[str]
) -> None:
    path = run_object(state.run.run_id)
    try:
        body = read_sealed_json(path, store.read(path))
    except NotFound:
        if read_mark(store) is None:
            notes.append(f"{path}: not written, as an older version made the run")
        else:
            find(path, "the object", "when the run was made, and by which ledger", "none")
        return
    except LedgerError as error:
        what, _, rest = str(error).partition("\n")
        find(path, what.split(":")[0], "what was written", rest.strip())
        return
    for name, expected in (("ledger_id", ledger_id), ("created_at", state.run.created_at)):
        if body.get(name) != expected:
            find(path, f"its {name}", f"{expected}, as in the catalog", body.get(name))


def _check_exported(state: RunState, find: Find) -> None:
    """Links are written commit by commit."""
    ends = {0} | {c.last_seq for c in state.commits}
    if state.exported not in ends:
        find("catalog, exports", "its last seq", "the last seq of a commit", state.exported)


def _check_epochs(
    store: ObjectStore,
    state: RunState,
    stored: StoredRun,
    epochs_now: Mapping[str, int],
    find: Find,
) -> None:
    """An epoch is noted beside the data before the catalog gives it out, so it is never behind."""
    noted: dict[str, int] = {}
    for path in stored.producers:
        try:
            body = read_sealed_json(path, store.read(path))
        except NotFound:
            continue
        except LedgerError as error:
            what, _, rest = str(error).partition("\n")
            find(path, what.split(":")[0], "what was written", rest.strip())
            continue
        producer, epoch = body["producer"], body["epoch"]
        meant = epoch_object(state.run.run_id, producer, epoch)
        if (body["run_id"], path) != (state.run.run_id, meant):
            of = f"run {body['run_id']!r}, producer {producer!r}, epoch {epoch}"
            find(path, "what it is about", "as its name says", of)
            continue
        noted[producer] = max(epoch, noted.get(producer, 0))
    marked = read_mark(store) is not None  # an older version noted nothing
    before = {row["producer"]: row["epoch"] for row in state.rows["producers"]}
    for producer in sorted(noted.keys() | before.keys()):
        high, given = noted.get(producer, 0), before.get(producer, 0)
        where = f"catalog, producers {producer!r}"
        if producer not in noted:
            if marked:
                find(where, "its epoch", "an epoch that is noted beside the data", given)
        # One more may be noted than given out: whoever asked for it died.
        elif given > high or epochs_now.get(producer, 0) < high - 1:
            found = "no row" if producer not in before else given
            find(where, "its epoch", f"{high}, as noted beside the data", found)


def check_unnamed(store: ObjectStore, state: RunState, stored: StoredRun, find: Find) -> list[str]:
    """Look at the segment files that no location names and that do not wait for collection.

    One that a writer left, of an append that was never committed, is a note: it changes nothing.
    One that is not what a writer leaves was put there by somebody: that is a finding.
    """
    named = {s.file.path for s in state.segments if s.file is not None}
    named |= {row["path"] for row in state.rows["unreferenced"]}
    left: list[str] = []
    for path in sorted((stored.hot | stored.sealed) - named):
        try:
            data = store.read(path)
        except NotFound:
            continue
        wrong = _not_a_writers(path, data, state.run.run_id, in_folder=store.root is not None)
        if wrong is None:
            left.append(path)
        else:
            find(path, "a file that nothing names", "what a writer leaves", wrong)
    if not left:
        return []
    shown = ", ".join(left[:_LISTED]) + (", …" if len(left) > _LISTED else "")
    return [
        f"run {state.run.run_id!r}: {len(left)} files that no location names: of appends that were "
        f"never committed, or are under way (ledger gc removes them later): {shown}"
    ]


def check_waiting(store: ObjectStore, state: RunState, stored: StoredRun, find: Find) -> None:
    """Look at the files that wait for collection, and at what the catalog says of them.

    One that is gone already is no finding: a collection may have been killed in between.
    """
    now = time.time_ns() // 1000
    for row in state.rows["unreferenced"]:
        path = row["path"]
        where = f"catalog, unreferenced {path}"
        if row["reason"] not in ("compacted", "retired"):
            find(where, "its reason", "compacted or retired", row["reason"])
        if not state.run.created_at <= row["since"] <= now:
            find(where, "since when", f"{state.run.created_at} to {now}", row["since"])
        if not stored.has(path):
            if not path.startswith(f"runs/{state.run.run_id}/"):
                find(where, "its path", "a segment file of this run", path)
            continue
        try:
            data = store.read(path)
        except NotFound:
            continue
        if data.size != row["size_bytes"]:
            find(where, "its size in bytes", data.size, row["size_bytes"])
        name, digest = path.rpartition("/")[2].rpartition(".")[0], file_hash(data).hex()
        if name != digest:
            find(path, "a file that waits for collection", f"blake3 {name}", f"blake3 {digest}")


def _not_a_writers(path: str, data: pa.Buffer, run_id: str, *, in_folder: bool) -> str | None:
    """Why a file is none that a writer or a compaction of this run left; None where it may be."""
    name = path.rpartition("/")[2].rpartition(".")[0]
    digest = file_hash(data).hex()
    if name != digest:
        # In a folder a small hot file has its name before all of its bytes.
        half_written = in_folder and path.endswith(".arrow")
        return None if half_written else f"a file whose blake3 is {digest}"
    if path.endswith(".parquet"):
        return None  # of a compaction that lost or was interrupted: it says only what it holds
    try:
        with pa.ipc.open_file(data) as opened:
            runs = {who.run_id for who, *_ in read_identities(opened.schema.empty_table())}
    except (LedgerError, pa.ArrowException, OSError, ValueError) as error:
        return f"no segment: {str(error).splitlines()[0]}"
    return None if runs == {run_id} else f"a segment of run {sorted(runs)}"
