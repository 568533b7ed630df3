"""A folder that was copied while it was written opens at a committed point."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.errors import Corrupt
from ledger.verify import verify_ledger
from tests.ledger import factory

COPIES = 20


def copy(source: Path, target: Path, *, backwards: bool) -> None:
    """Like `cp -r`: one file after the other, in the order of the listing or against it."""
    target.mkdir()
    entries = list(os.scandir(source))
    for entry in reversed(entries) if backwards else entries:
        if entry.is_dir():
            copy(Path(entry.path), target / entry.name, backwards=backwards)
        elif not entry.name.startswith(".tmp-"):
            try:
                shutil.copyfile(entry.path, target / entry.name)
            except FileNotFoundError:
                continue  # it was removed meanwhile


def test_every_copy_is_a_prefix(quick_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path = quick_path
    folder = tmp_path / "ledger"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.ledger.copy_child", str(folder)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        for number in range(COPIES):
            copy(folder, tmp_path / f"copy-{number}", backwards=number % 2 == 1)
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()
    with open_ledger(folder) as ledger:
        chain = {s.last_seq: s.chain for s in ledger.segment_infos("run")} | {0: bytes(32)}
    heads = []
    for number in range(COPIES):
        copied = tmp_path / f"copy-{number}"
        if number in (6, 7):  # for reading, nothing is written
            before = sorted(copied.iterdir())
            with open_ledger(copied, read_only=True) as ledger:
                assert ledger.run().head_chain == chain[ledger.run().head_seq]
                report = verify_ledger(ledger)
                assert report.ok, report.lines()
            assert [p for p in sorted(copied.iterdir()) if p not in before] == []
        with open_ledger(copied) as ledger:
            head = ledger.run()
            assert head.head_chain == chain[head.head_seq]
            heads.append(head.head_seq)
            if number in (0, 1, 12, 13):
                ledger.writer("run", producer="p").append([factory.score(10**6, 1.0)])
                report = verify_ledger(ledger)
                assert report.ok, report.lines()
            else:
                reader = ledger.reader("run")
                rows = sum(reader.table(kind).num_rows for kind in reader.kinds())
                assert rows == head.head_seq
    assert heads[-1] > heads[0] > 0
    assert "was copied while it was written" in caplog.text


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        writer = ledger.writer("run", producer="p")
        for number in range(6):
            writer.append([factory.score(number, 1.0)])
    return tmp_path / "ledger"


def test_a_sound_copy_and_a_moved_folder_are_left_as_they_are(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "copy")
    written.rename(tmp_path / "moved")
    for folder in (tmp_path / "copy", tmp_path / "moved"):
        with open_ledger(folder) as ledger:
            assert ledger.run().head_seq == 6
        assert not list(folder.glob("*.torn-*"))


def test_a_torn_end_is_cut_and_kept_aside(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(written) as ledger:
        files = [s.file.path for s in ledger.segment_infos("run") if s.file is not None]
        copied = Path(shutil.copytree(written, tmp_path / "copy"))
    (copied / files[5]).unlink()
    os.truncate(copied / files[4], 100)
    with open_ledger(copied) as ledger:
        assert ledger.run().head_seq == 4
        assert verify_ledger(ledger).ok
    assert "opens at seq 4" in caplog.text
    assert len(list(copied.glob("catalog.sqlite.torn-*"))) == 1


def test_a_catalog_that_is_no_database_any_more_is_made_from_the_links(
    written: Path, tmp_path: Path
) -> None:
    with open_ledger(written) as ledger:
        assert ledger.run().head_seq == 6
        copied = Path(shutil.copytree(written, tmp_path / "copy"))
    catalog = copied / "catalog.sqlite"
    whole = catalog.read_bytes()
    catalog.write_bytes(whole[: 3 * 4096] + bytes(len(whole) - 3 * 4096))
    with open_ledger(copied, read_only=True) as ledger:
        assert ledger.run().head_seq == 6
    with open_ledger(copied) as ledger:
        assert ledger.run().head_seq == 6
        assert verify_ledger(ledger).ok


def test_files_missing_in_the_middle_are_no_torn_end(written: Path, tmp_path: Path) -> None:
    with open_ledger(written) as ledger:
        files = [s.file.path for s in ledger.segment_infos("run") if s.file is not None]
    connection = sqlite3.connect(written / "catalog.sqlite")
    with connection:  # as if the run had taken hours
        connection.execute(
            "UPDATE commits SET committed_at = committed_at + first_seq * 3600000000"
        )
    connection.close()
    with open_ledger(written) as ledger:
        assert ledger.run().head_seq == 6
        copied = Path(shutil.copytree(written, tmp_path / "copy"))
    shutil.rmtree(copied / "runs" / "run" / "links")
    (copied / files[2]).unlink()
    with pytest.raises(Corrupt, match="in the middle"):
        open_ledger(copied)
    assert not list(copied.glob("*.torn-*"))


def test_what_is_missing_in_a_copy_of_a_ledger_at_rest_is_a_loss(
    written: Path, tmp_path: Path
) -> None:
    with open_ledger(written) as ledger:
        files = [s.file.path for s in ledger.segment_infos("run") if s.file is not None]
    copied = Path(shutil.copytree(written, tmp_path / "copy"))
    (copied / files[5]).unlink()
    with open_ledger(copied) as ledger:
        assert ledger.run().head_seq == 6
        assert not verify_ledger(ledger).ok
