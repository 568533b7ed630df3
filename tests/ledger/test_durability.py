"""What is acknowledged survives a power cut: by the order of syncs, and by a model of losses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from blake3 import blake3

from ledger import open_ledger
from ledger.catalog import tables as t
from ledger.events import Event
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from ledger.writer import Writer
from tests.ledger import factory
from tests.ledger.syscalls import PowerCut, Step, lay_out, recording, recording_catalog

ROOT = Path(__file__).parents[2]
SMALL = [factory.score(1, 1.0), factory.responses(0)[0], factory.score(2, 0.0)]
ALONE = [factory.score(1, 1.0), factory.weights(1, 0, None), factory.score(2, 0.0)]
"""Of a kind that shares no file with other appends."""


def begin(folder: Path) -> None:
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("r")
        ledger.writer("r", producer="p").append([factory.weights(0, None, None)])


def copy_catalog(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("catalog.sqlite*"):
        shutil.copy(path, folder / path.name)


def recorded(
    folder: Path, append: Callable[[Writer], object], *, to_the_end: bool = False
) -> list[Step]:
    """What an append to the ledger in `folder` does, from its call to its acknowledgement.

    With `to_the_end` until the ledger is closed: what goes on in the background too.
    """
    with open_ledger(folder) as ledger:
        writer = ledger.writer("r", producer="p", epoch=1)
        with recording(folder) as log, recording_catalog(ledger, log):
            append(writer)
            acknowledged = list(log)
            if to_the_end:
                ledger.close()
    return log if to_the_end else acknowledged


def at_commit(log: Sequence[Step]) -> int:
    (only,) = (number for number, step in enumerate(log) if step.what == "commit")
    return only


@pytest.mark.parametrize("events", [SMALL, ALONE], ids=["small", "alone"])
def test_a_power_cut_at_any_point_loses_nothing_and_shows_nothing_half(
    quick_path: Path, events: Sequence[Event]
) -> None:
    base, live = quick_path / "base", quick_path / "live"
    begin(base)
    shutil.copytree(base, live)
    log = recorded(live, lambda writer: writer.append(events, producer_seq=1))
    commit = at_commit(log)
    cut = PowerCut(base)
    tried: set[tuple[bool, int]] = set()
    for done in range(len(log) + 1):
        if done:
            cut.apply(log[done - 1])
        for state in cut.states():
            for committed in {done > commit + 1, done > commit}:
                key = (committed, hash(tuple(state.items())))
                if key in tried:
                    continue
                tried.add(key)
                left = quick_path / "left"
                lay_out(state, left)
                copy_catalog(live if committed else base, left)
                _require_whole(left, events, committed, f"after {done} of {log}")
                shutil.rmtree(left)
    # The model knows all that was done: at the end it shows what the kernel shows.
    shown = {path.relative_to(live).as_posix(): path.read_bytes() for path in live.rglob("*.arrow")}
    assert {n: b for n, b in cut.current().items() if n.endswith(".arrow")} == shown
    assert len(tried) > 10


def _require_whole(folder: Path, events: Sequence[Event], committed: bool, when: str) -> None:
    with open_ledger(folder) as ledger:
        run = ledger.run("r")
        assert run.head_seq == (4 if committed else 1), when
        for kind in ("sample_scored", "weights_published", "segment_generated"):
            ledger.reader("r").table(kind)
        receipt = ledger.writer("r", producer="p", epoch=1).append(events, producer_seq=1)
        assert (receipt.first_seq, receipt.last_seq) == (2, 4), when
        assert ledger.reader("r").table("sample_scored")["index"].to_pylist() == [1, 2], when


@pytest.mark.parametrize("events", [SMALL, ALONE], ids=["small", "alone"])
def test_all_that_a_commit_refers_to_is_synced_before_it_and_acknowledged_after_it(
    quick_path: Path, events: Sequence[Event]
) -> None:
    base, live = quick_path / "base", quick_path / "live"
    begin(base)
    shutil.copytree(base, live)
    log = recorded(live, lambda writer: writer.append(events, producer_seq=1))
    commit = at_commit(log)
    assert log[commit - 1].what == "begin"
    assert log[commit + 1].what == "committed"
    cut = PowerCut(base)
    for step in log[:commit]:
        cut.apply(step)
    with open_ledger(live) as ledger, ledger.catalog.read() as connection:
        rows = connection.execute(sa.select(t.locations.c.path, t.locations.c.file_hash)).fetchall()
    assert len(rows) == 3
    for state in cut.states():
        for path, file_hash in rows:
            data = state[path]
            assert data is not None
            assert blake3(data).digest() == file_hash


def test_the_model_finds_a_missing_sync(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the two tests above could not fail."""
    from ledger.storage import local

    begin(quick_path / "base")

    def lost(name: str, log: Sequence[Step]) -> bool:
        cut = PowerCut(quick_path / "base")
        for step in log[: at_commit(log)]:
            cut.apply(step)
        written = {path for path in cut.current() if path.endswith(".arrow")}
        return any(
            state.get(path) != cut.current()[path] for state in cut.states() for path in written
        )

    def log_with(**changes: object) -> list[Step]:
        live = quick_path / "live"
        shutil.copytree(quick_path / "base", live)
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(local, name, value)
            found = recorded(live, lambda writer: writer.append(ALONE, producer_seq=1))
        shutil.rmtree(live)
        return found

    assert not lost("nothing", log_with())
    whole = log_with()
    without_files = [s for s in whole if not (s.what == "fsync" and ".tmp-" in s.path)]
    assert lost("files", without_files)
    without_folders = [s for s in whole if not (s.what == "fsync" and ".tmp-" not in s.path)]
    assert lost("folders", without_folders)


def test_sqlite_syncs_in_every_commit_on_every_connection(quick_path: Path) -> None:
    begin(quick_path / "ledger")
    with open_ledger(quick_path / "ledger") as ledger:
        seen = []
        with ledger.catalog.write() as connection:
            seen.append(connection.connection.dbapi_connection)
            with ledger.catalog.read() as other:
                seen.append(other.connection.dbapi_connection)
            for own in seen:
                assert own is not None
                mode = own.execute("PRAGMA journal_mode").fetchone()[0]
                synchronous = own.execute("PRAGMA synchronous").fetchone()[0]
                assert (mode, synchronous) == ("wal", 2)
        assert seen[0] is not seen[1]


_TRACED = textwrap.dedent(
    """
    import os, sys
    from ledger import open_ledger
    from tests.ledger.test_durability import ALONE, SMALL

    with open_ledger(sys.argv[1]) as ledger:
        writer = ledger.writer("r", producer="p", epoch=1)
        for number, events in ((1, SMALL), (2, [e for e in ALONE if e.KIND != "sample_scored"])):
            os.write(1, b"append")
            writer.append(events, producer_seq=number)
            os.write(1, b"stored")
    """
)


def test_the_kernel_saw_the_syncs_in_this_order(quick_path: Path) -> None:
    """By strace: SQLite's own calls too."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: the order of SQLite's own syncs is not proven here")
    begin(quick_path / "ledger")
    trace = quick_path / "trace"
    calls = "openat,write,pwrite64,fsync,fdatasync,link,rename"
    done = subprocess.run(
        [
            *("strace", "-f", "-y", "-s", "16", "-o", str(trace), "-e", f"trace={calls}"),
            *(sys.executable, "-c", _TRACED, str(quick_path / "ledger")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    steps = _steps(trace.read_text())
    bounds = [n for n, (call, path) in enumerate(steps) if path in ("append", "stored")]
    assert len(bounds) == 4
    for begun, ended in ((bounds[0], bounds[1]), (bounds[2], bounds[3])):
        own = steps[begun:ended]
        files = {p for c, p in own if c == "write" and "/hot/" in p}
        assert files
        logged = [n for n, (c, p) in enumerate(own) if c == "pwrite64" and p.endswith("-wal")]
        synced = [n for n, (c, p) in enumerate(own) if "sync" in c and p.endswith("-wal")]
        assert synced, own
        # The log of SQLite is synced after its last write of the commit, before the answer.
        assert synced[-1] > logged[-1]
        for path in files:
            last_write = max(n for n, step in enumerate(own) if step == ("write", path))
            sync = min(n for n, (c, p) in enumerate(own) if "sync" in c and p == path)
            folder = path.rpartition("/")[0]
            folder_sync = max(n for n, (c, p) in enumerate(own) if c == "fsync" and p == folder)
            assert last_write < sync < folder_sync < logged[0], own


def _steps(text: str) -> list[tuple[str, str]]:
    """Name and path of each call, in the order in which they ended; marks as 'append', 'stored'."""
    steps = []
    unfinished: dict[str, str] = {}
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        if "<unfinished ...>" in line:
            unfinished[pid] = rest
            continue
        if "resumed>" in rest:
            rest = unfinished.pop(pid, "") + rest
        found = re.match(r"\s*(\w+)\((.*)", rest)
        if found is None:
            continue
        call, arguments = found.groups()
        mark = re.match(r'1<[^>]*>, "(append|stored)"', arguments)
        path = re.match(r"\d+<([^>]*)>", arguments)
        if mark:
            steps.append(("mark", mark[1]))
        elif path:
            steps.append((call, path[1]))
    return steps


def test_half_written_files_are_replaced_when_their_append_is_repeated(quick_path: Path) -> None:
    """A crash may leave other bytes under the name that the hash gave a small file."""
    store = LocalStore(quick_path)
    name = f"runs/r/hot/k/{blake3(b'right').hexdigest()}.arrow"
    (quick_path / name).parent.mkdir(parents=True)
    (quick_path / name).write_bytes(b"rig")
    store.put_hashed([(name, b"right")])
    assert (quick_path / name).read_bytes() == b"right"
    store.close()


def test_after_a_power_cut_of_a_closed_ledger_nothing_at_all_is_missing(quick_path: Path) -> None:
    base, live = quick_path / "base", quick_path / "live"
    begin(base)
    shutil.copytree(base, live)
    log = recorded(live, lambda writer: writer.append(SMALL, producer_seq=1), to_the_end=True)
    cut = PowerCut(base)
    for step in log:
        cut.apply(step)
    state = next(iter(cut.states()))  # nothing that was not synced
    lay_out(state, quick_path / "left")
    copy_catalog(live, quick_path / "left")
    with open_ledger(quick_path / "left") as ledger:
        assert verify_ledger(ledger).ok
