"""The store alone is enough: links beside the data, and the catalog made from them again."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.cli import main
from ledger.compact import compact, plan_compaction
from ledger.errors import AlreadyExists, Conflict, Corrupt, NotFound, StorageFailed
from ledger.exporter import LinkExporter, export_links
from ledger.links import links_folder, parse_links, put_epoch, put_run, read_sealed_json
from ledger.place import place_of
from ledger.rebuild import read_store
from ledger.rebuild_catalog import rebuild_catalog
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.keeping import all_rows, what_readers_see

CATALOG = "catalog.sqlite"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story") / "ledger"
    with factory.write_story(folder) as ledger:
        ledger.exporter.flush()
        # The same links in one object, however long the story took to write.
        shutil.rmtree(folder / links_folder(factory.RUN))
        with ledger.catalog.write() as connection:
            connection.exec_driver_sql("DELETE FROM exports")
        export_links(ledger.catalog, ledger.store, ledger.ledger_id, factory.RUN)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def rebuild(folder: Path, **options: bool) -> tuple[str, ...]:
    report = rebuild_catalog(place_of(LocalStore(folder), None), **options)
    return tuple(str(f) for f in report.findings)


def lose(folder: Path) -> None:
    for path in folder.glob(f"{CATALOG}*"):
        path.unlink()


def link_files(folder: Path) -> list[Path]:
    return sorted((folder / links_folder(factory.RUN)).iterdir())


def test_a_deleted_catalog_comes_back_row_for_row(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        rows, seen = all_rows(ledger), what_readers_see(ledger)
    assert len(rows["commits"]) == len(factory.story())
    assert all(rows[name] for name in ("branches", "versions", "consumption", "producers"))
    lose(folder)
    assert rebuild(folder) == ()
    with open_ledger(folder) as ledger:
        assert all_rows(ledger) == rows
        assert what_readers_see(ledger) == seen
        assert verify_ledger(ledger).ok
        # It goes on where it was: numbers, chain, epochs.
        with ledger.writer(factory.RUN, producer="factory") as writer:
            assert writer.epoch == 3
            writer.append([factory.score(0, 1.0)])
        assert verify_ledger(ledger).ok


def test_a_torn_catalog_is_moved_aside_and_a_sound_one_is_not_touched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ledger(folder) as ledger:
        rows = all_rows(ledger)
    torn = (folder / CATALOG).read_bytes()[:-4096] + bytes(4096)
    before = (folder / CATALOG).read_bytes()
    with pytest.raises(AlreadyExists, match="it is sound"):
        rebuild(folder)
    assert (folder / CATALOG).read_bytes() == before
    (folder / CATALOG).write_bytes(torn)
    assert main(["rebuild-catalog", "--ledger", str(folder), "--dry-run"]) == 0
    assert (folder / CATALOG).read_bytes() == torn
    assert main(["rebuild-catalog", "--ledger", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("changed\n")[2])["events"] == 102
    (aside,) = folder.glob(f"{CATALOG}.old-*[0-9]")
    assert aside.read_bytes() == torn
    with open_ledger(folder) as ledger:
        assert all_rows(ledger) == rows
    assert rebuild(folder, force=True) == ()
    with open_ledger(folder) as ledger:
        assert all_rows(ledger) == rows


def test_nothing_is_made_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(NotFound, match="tells of no run"):
        rebuild(tmp_path)
    assert not (tmp_path / CATALOG).exists()


def test_commits_whose_links_were_not_written_are_told(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        rows = all_rows(ledger)
        ledger.exporter = LinkExporter(ledger.catalog, _Full(folder), ledger.ledger_id)  # type: ignore[arg-type]
        with ledger.writer(factory.RUN, producer="late") as writer:
            writer.append([factory.score(0, 1.0), factory.decide(0, "kept", rollout_step=0)])
            writer.append([factory.score(1, 1.0)])
    lose(folder)
    report = read_store(LocalStore(folder))
    (unlinked,) = report.unlinked
    assert (unlinked.producer, unlinked.epoch) == ("late", 1)
    assert (unlinked.files, unlinked.appends) == (3, 2)
    assert report.ok
    assert "in the last second before a crash" in "\n".join(report.lines())
    rebuild(folder)
    with open_ledger(folder) as ledger:
        found = all_rows(ledger)
        assert {**found, "producers": ()} == {**rows, "producers": ()}
        # The epoch was noted before it was used: who held it is fenced off by the next.
        assert (factory.RUN, "late", 1) in found["producers"]
        # An append that is repeated becomes the ledger's again.
        with ledger.writer(factory.RUN, producer="late", epoch=1) as writer:
            writer.append([factory.score(1, 1.0)], producer_seq=1)
        assert verify_ledger(ledger).ok


class _Full(LocalStore):
    """A store that takes nothing."""

    def put(self, objects: object) -> None:
        raise StorageFailed("the disk is full")


def test_an_export_that_fails_is_logged_and_done_later(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(folder) as ledger:
        failing = LinkExporter(ledger.catalog, _Full(folder), ledger.ledger_id)
        ledger.writer(factory.RUN, producer="p").append([factory.score(0, 1.0)])
        with caplog.at_level(logging.WARNING, "ledger.exporter"):
            failing.notify(factory.RUN)
            assert failing.flush() is False
        assert "the disk is full" in caplog.text
        assert export_links(ledger.catalog, ledger.store, ledger.ledger_id, factory.RUN) == 1
        assert export_links(ledger.catalog, ledger.store, ledger.ledger_id, factory.RUN) == 0
        failing.close()
    assert main(["export-links", "--ledger", str(folder)]) == 0


def test_links_follow_in_the_background(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        ledger.exporter = LinkExporter(ledger.catalog, ledger.store, ledger.ledger_id, 0.01)
        for number in range(2):
            before = len(link_files(folder))
            ledger.writer(factory.RUN, producer="p").append([factory.score(number, 1.0)])
            deadline = time.monotonic() + 30
            while len(link_files(folder)) == before:
                assert time.monotonic() < deadline
        head = ledger.run(factory.RUN).head_seq
    assert link_files(folder)[-1].name == f"{head:020d}-{head:020d}.json"


def test_two_exporters_overlap_and_agree(folder: Path) -> None:
    with open_ledger(folder) as one, open_ledger(folder) as other:
        for number in range(4):
            with one.catalog.write() as connection:
                connection.exec_driver_sql("UPDATE exports SET last_seq = 0")
            one.writer(factory.RUN, producer="p", epoch=None).append([factory.score(number, 1.0)])
            export_links(other.catalog, other.store, other.ledger_id, factory.RUN)
        rows = all_rows(one, "exports")
    assert len(link_files(folder)) == 5
    lose(folder)
    assert rebuild(folder) == ()
    with open_ledger(folder) as ledger:
        assert all_rows(ledger, "exports") == rows


def test_damaged_links_are_found_and_only_what_is_sure_is_restored(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        for number in range(3):
            ledger.writer(factory.RUN, producer=f"p{number}").append([factory.score(0, 1.0)])
            ledger.exporter.flush()
    first, middle, _, last = link_files(folder)
    good = middle.read_bytes()
    flipped = bytearray(good)
    for at in range(7, len(good), len(good) // 12):
        flipped[at] ^= 1
        middle.write_bytes(flipped)
        report = read_store(LocalStore(folder))
        assert not report.ok, at
        assert report.commits == len(factory.story())
        flipped[at] ^= 1
    middle.unlink()
    lose(folder)
    with pytest.raises(Conflict, match="without a hole"):
        rebuild(folder)
    assert not (folder / CATALOG).exists()
    (found,) = rebuild(folder, force=True)
    assert "2 commits from seq 104 on are left out" in found
    with open_ledger(folder) as ledger:
        assert ledger.run(factory.RUN).head_seq == 102
        ledger.writer(factory.RUN, producer="new").append([factory.score(0, 1.0)])
    assert [p.name for p in link_files(folder)] == [first.name, f"{1:020d}-{103:020d}.json"]
    assert (folder / "runs" / factory.RUN / "links-set-aside" / last.name).exists()
    lose(folder)
    assert rebuild(folder) == ()


def test_a_missing_segment_and_a_foreign_run_are_told(folder: Path) -> None:
    gone = next((folder / "runs" / factory.RUN / "hot" / "sample_decided").iterdir())
    gone.unlink()
    lose(folder)
    (found,) = rebuild(folder)
    assert gone.name in found
    with open_ledger(folder) as ledger:
        (finding,) = verify_ledger(ledger).findings
        assert gone.name in str(finding)
    store = LocalStore(folder)
    put_run(store, "ff" * 16, "other", 5)
    with pytest.raises(Conflict, match="several ledgers"):
        rebuild(folder, force=True)


def test_runs_and_epochs_are_noted_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert put_run(store, "id", "r", 5) == 5
    assert put_run(store, "id", "r", 6) == 5
    with pytest.raises(Corrupt, match="another run's"):
        put_run(store, "other", "r", 6)
    producers = ["a/b", "..", ".hidden", "", "ü" * 200, "a b%2F", "x" * 300]
    for producer in producers:
        for _ in range(2):
            put_epoch(store, "id", "r", producer, 3)
    found = [read_sealed_json(path, store.read(path)) for path in store.list("runs/r/producers")]
    assert sorted(body["producer"] for body in found) == sorted(producers)


def test_links_say_all_that_the_catalog_knows(folder: Path) -> None:
    """A field that is added to a commit or segment must find its way into the links."""
    (path,) = link_files(folder)
    store = LocalStore(folder)
    body, commits = parse_links("x", store.read(path.relative_to(folder).as_posix()))
    with open_ledger(folder) as ledger:
        assert [s for c in commits for s in c.segments] == ledger.segment_infos(factory.RUN)
    assert {f.name for f in dataclasses.fields(commits[0])} == {
        *(name for name in body["commits"][0]),
        "run_id",
    }


def test_a_damaged_sealed_file_is_passed_over_where_the_hot_ones_are_there(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        compact(ledger, plan_compaction(ledger))
        seen = what_readers_see(ledger)
    kind = "segment_generated"
    (sealed,) = (folder / f"runs/{factory.RUN}/sealed/{kind}").iterdir()
    data = bytearray(sealed.read_bytes())
    data[len(data) // 3] ^= 1
    sealed.write_bytes(data)
    lose(folder)
    assert rebuild(folder) == ()
    with open_ledger(folder) as ledger:
        assert {s.file.format for s in ledger.segment_infos(factory.RUN) if s.file} == {
            "arrow-ipc",
            "parquet",
        }
        hot = [s.file for s in ledger.segment_infos(factory.RUN) if s.kind == kind]
        assert {file.format for file in hot if file} == {"arrow-ipc"}
        assert what_readers_see(ledger) == seen
    # Without them it is all there is: the rest is there, and verification names it.
    for file in hot:
        assert file is not None
        (folder / file.path).unlink(missing_ok=True)
    lose(folder)
    rebuild(folder)
    with open_ledger(folder) as ledger:
        assert ledger.run(factory.RUN).head_seq == 102
        findings = verify_ledger(ledger).findings
        assert any(sealed.name in str(f) for f in findings)
        with pytest.raises(Corrupt, match=sealed.name):
            ledger.reader(factory.RUN, None).table(kind)
