"""Ledgers that cannot be written are read; SQLite is not written where its locks do not hold."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ledger import open_ledger
from ledger.catalog import copies, mounts
from ledger.catalog.mounts import filesystem_of, network_filesystem
from ledger.errors import InvalidArgument, StorageFailed
from ledger.verify import verify_ledger
from tests.ledger import factory, read_only_child

EVENTS = factory.story()[0].events

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw
40 22 0:45 / /data rw,relatime shared:9 - nfs4 filer:/export/data rw,vers=4.2
41 40 8:2 / /data/local rw,relatime - xfs /dev/sdb1 rw
42 22 0:50 /a\040b /with\040space rw - fuse.sshfs me@host:/x rw
43 22 0:51 / /twice rw - ext4 /dev/sdc1 rw
44 43 0:52 / /twice rw - cifs //server/share rw
45 22 0:53 / /lustre rw,flock - lustre 10.0.0.1@tcp:/fs rw
a line of another kind
46 22 0:54 / /win rw master:2 propagate_from:1 - 9p drvfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/data/ledger", "nfs4"),
        ("/data", "nfs4"),
        ("/database", "ext4"),
        ("/data/local/ledger", "xfs"),
        ("/with space/l", "fuse.sshfs"),
        ("/twice/l", "cifs"),
        ("/lustre/l", "lustre"),
        ("/win/l", "9p"),
        ("/proc/self", "proc"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_nothing_is_known_of_no_mounts() -> None:
    assert filesystem_of("/x", "") is None
    assert network_filesystem(Path("/proc/self")) is None


def test_sqlite_on_a_network_file_system_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_ledger(tmp_path / "l", create=True) as ledger:
        ledger.create_run("run")
        ledger.writer("run", producer="p").append(EVENTS)
        # the log has what the file does not have yet: both are copied
        assert (tmp_path / "l" / "catalog.sqlite-wal").stat().st_size > 0
        monkeypatch.setattr(mounts, "filesystem_of", lambda *_: "nfs4")
        with open_ledger(tmp_path / "l") as reading:
            assert reading.read_only
            assert reading.run().head_seq == len(EVENTS)
            assert verify_ledger(reading).ok
            with pytest.raises(InvalidArgument) as refused:
                reading.writer("run", producer="p")
        for way in ("--catalog postgresql", "--catalog sqlite:////", "nfs4", mounts.OVERRIDE):
            assert way in str(refused.value)
    with pytest.raises(InvalidArgument, match="nfs4"):
        open_ledger(tmp_path / "new", create=True)
    assert not (tmp_path / "new" / "ledger.json").exists()
    monkeypatch.setenv(mounts.OVERRIDE, "1")
    with open_ledger(tmp_path / "l") as ledger:
        assert not ledger.read_only


def test_a_catalog_that_never_rests_is_not_copied_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ledger(tmp_path / "l", create=True).close()
    path = tmp_path / "l" / "catalog.sqlite"
    real = copies.shutil.copyfile

    def busy(source: Path, target: Path) -> Any:
        copied = real(source, target)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        return copied

    monkeypatch.setattr(copies.shutil, "copyfile", busy)
    with pytest.raises(StorageFailed, match="faster than it can be copied"):
        copies.copy_to_memory(path)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches: pytest's own are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="ledger-test-"))
    folder.chmod(0o755)
    yield folder
    for inside, _, _ in os.walk(folder):
        os.chmod(inside, 0o755)
    shutil.rmtree(folder)


def test_without_the_right_to_write(open_folder: Path) -> None:
    folder = open_folder / "l"
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("run")
        ledger.writer("run", producer="p").append(EVENTS)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.ledger.read_only_child"])
    mine, theirs = server.Pipe()
    child = server.Process(target=read_only_child.main, args=(str(folder), theirs))
    child.start()
    assert said(mine) == "ready"
    before = set(os.listdir(folder))
    folder.chmod(0o555)
    (folder / "catalog.sqlite").chmod(0o444)
    mine.send("go on")
    assert said(mine) == "open"
    mine.send("go on")
    found = said(mine)
    child.join(60)
    folder.chmod(0o755)
    assert isinstance(found, dict), found
    refused, not_made = found.pop("refused"), found.pop("not made")
    assert "read-only to this process" in refused
    assert "read-only to this process" in not_made
    assert set(found.pop("files")) == before
    n = len(EVENTS)
    assert found == {"writable": False, "head": n, "head later": n, "events": n, "ok": True}


def said(connection: Connection) -> Any:
    assert connection.poll(120)
    answer = connection.recv()
    if isinstance(answer, str) and answer.startswith("Traceback"):
        pytest.fail(answer)
    return answer
