"""Ledgers of older versions are read as they are, raised, and taken back."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import migrations
from ledger import open_ledger
from ledger.cli import main
from ledger.errors import Conflict, IncompatibleFormat, InvalidArgument
from ledger.events import GapRecorded
from ledger.mark import read_mark
from ledger.migrate import migrate_catalog
from ledger.place import place_of
from ledger.storage import open_store
from ledger.verify import verify_ledger
from tests.ledger import factory

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger-0001"
"""Written by the version of revision 0001: the factory's story, and some numbers given out."""

DIGESTS = {
    "main": "37ebfa608ea690b20c4ab538228189ce23f02ebd13a70892b6f435e52a7eaf22",
    None: "49b08ec49b5c8059588f14919654741d8bc5832812a0767de0a8c0437b25f7bd",
}


GAP = GapRecorded(
    producer="p",
    epoch=1,
    first_producer_seq=0,
    last_producer_seq=0,
    kinds=["sample_scored"],
    counts=np.array([1]),
    began_at=None,
    ended_at=None,
    reason="a test",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "old"))


def files(folder: Path) -> dict[str, str]:
    # Who writes takes turns on a file of no content.
    found = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "catalog.sqlite-turns")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def rows(folder: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_an_older_ledger_is_read_and_not_changed(old: Path) -> None:
    before = files(old)
    with open_ledger(old) as ledger:
        assert ledger.read_only
        assert {b: ledger.content_digest("run", b).hex() for b in DIGESTS} == DIGESTS
        report = verify_ledger(ledger)
        assert report.ok, report.lines()
        for write in (
            lambda: ledger.create_run("other"),
            lambda: ledger.writer("run", producer="p"),
        ):
            with pytest.raises(IncompatibleFormat, match="ledger migrate"):
                write()
    with pytest.raises(IncompatibleFormat, match="ledger migrate"):
        open_ledger(old, create=True).create_run("other")
    assert main(["sql", "--ledger", str(old), "select count(*) from samples"]) == 0
    after = files(old)
    assert {p: after[p] for p in before} == before
    assert set(after) - set(before) <= {"ledger.json"}


def test_up_with_a_copy_of_what_was_and_back_again(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(old)
    assert main(["migrate", "--ledger", str(old), "--dry-run"]) == 0
    assert "would go from 0001 to 0002" in capsys.readouterr().out
    assert files(old) == before
    tables = rows(old, "SELECT name, sql FROM sqlite_master ORDER BY name")
    counters = rows(old, "SELECT name, next FROM counters ORDER BY name")
    assert main(["migrate", "--ledger", str(old)]) == 0
    assert main(["migrate", "--ledger", str(old)]) == 0
    said = capsys.readouterr().out
    assert "went from 0001 to 0002" in said
    assert "already" in said
    assert read_mark(open_store(old)) is not None
    with open_ledger(old) as ledger:
        assert not ledger.read_only
        assert {b: ledger.content_digest("run", b).hex() for b in DIGESTS} == DIGESTS
        ledger.writer("run", producer="p").append([factory.score(0, 1.0)])
        report = verify_ledger(ledger)
        assert report.ok, report.lines()
        head = ledger.run()
    copy = old / "catalog.sqlite.before-0002"
    assert sqlite3.connect(copy).execute("SELECT version_num FROM alembic_version").fetchall() == [
        ("0001",)
    ]
    assert main(["migrate", "--ledger", str(old), "--to", "0001"]) == 0
    assert rows(old, "SELECT name, sql FROM sqlite_master ORDER BY name") == tables
    again = dict(rows(old, "SELECT name, next FROM counters"))
    # what was given out and never used is not remembered; what is used is
    assert dict(counters) == again | {
        "index": again["index"] + 4,
        "group_index": again["group_index"] + 2,
    }
    assert rows(old, "SELECT head_seq, head_chain FROM runs") == [(head.head_seq, head.head_chain)]
    with open_ledger(old) as ledger:
        assert ledger.read_only
        assert verify_ledger(ledger).ok


def test_what_the_older_version_cannot_read_stays(old: Path) -> None:
    place = place_of(open_store(old), None)
    migrate_catalog(place)
    with open_ledger(old) as ledger:
        ledger.writer("run", producer="p").append([GAP])
    before = rows(old, "SELECT name FROM sqlite_master ORDER BY name")
    with pytest.raises(Conflict, match="gap_recorded"):
        migrate_catalog(place, to="0001")
    assert rows(old, "SELECT name FROM sqlite_master ORDER BY name") == before
    with pytest.raises(InvalidArgument, match="0001, 0002"):
        migrate_catalog(place, to="0003")


def test_of_several_at_once_one_migrates(old: Path) -> None:
    start = threading.Barrier(4)

    def run(_: int) -> str:
        start.wait(60)
        return migrate_catalog(place_of(open_store(old), None)).before

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(run, range(4))) == ["0001", "0002", "0002", "0002"]
    assert len(list(old.glob("*.before-*"))) == 1


def test_a_migration_that_fails_leaves_all_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(old, "SELECT name, sql FROM sqlite_master ORDER BY name")
    real = migrations.upgrade

    def failing(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(migrations, "upgrade", failing)
    with pytest.raises(KeyboardInterrupt):
        migrate_catalog(place_of(open_store(old), None))
    assert rows(old, "SELECT name, sql FROM sqlite_master ORDER BY name") == before


def test_postgresql_is_migrated_too(tmp_path: Path, postgres_url: str) -> None:
    with open_ledger(tmp_path / "l", create=True, catalog=postgres_url) as ledger:
        ledger.create_run("run")
        ledger.writer("run", producer="p").append(factory.story()[0].events)
    place = place_of(open_store(tmp_path / "l"), postgres_url)
    assert migrate_catalog(place, to="0001", dry_run=True).after == "0001"
    assert migrate_catalog(place, to="0001").before == "0002"
    with open_ledger(tmp_path / "l", catalog=postgres_url) as ledger:
        assert ledger.read_only
        assert verify_ledger(ledger).ok
    assert migrate_catalog(place).before == "0001"
    with open_ledger(tmp_path / "l", catalog=postgres_url) as ledger:
        assert not ledger.read_only
        assert verify_ledger(ledger).ok
