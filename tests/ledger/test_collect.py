"""Garbage collection takes what nothing refers to, and nothing else, however slow a writer is."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ledger import Ledger, commit_queue, open_ledger
from ledger.cli import main
from ledger.collect import collect, plan_collection
from ledger.compact import compact, plan_compaction
from ledger.errors import Conflict
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.keeping import all_rows, what_readers_see

DAY_S = 86400.0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story") / "ledger"
    factory.write_story(folder).close()
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    with open_ledger(folder) as opened:
        yield opened


def age(path: Path, by_s: float = 2 * DAY_S) -> Path:
    """Let a file or folder look as if it had been written earlier."""
    then = time.time() - by_s
    for each in [path, *path.rglob("*")]:
        os.utime(each, (then, then))
    return path


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in (folder / "runs").rglob("*") if p.is_file()}


def gc(ledger: Ledger, grace_s: float = DAY_S, **options: bool) -> dict[str, int]:
    """How many things of each sort went."""
    plan = plan_collection(ledger, grace_s=grace_s, **options)
    done = collect(ledger, plan, grace_s=grace_s)
    return {g.why: sum(o.why == g.why for o in done.garbage) for g in done.garbage}


def test_a_ledger_that_is_in_use_has_no_garbage(ledger: Ledger, folder: Path) -> None:
    age(folder / "runs")
    before = files(folder)
    assert gc(ledger, grace_s=0, checkpoints=True) == {}
    assert files(folder) == before


def test_old_files_of_compacted_segments_go_after_the_grace_period(
    ledger: Ledger, folder: Path
) -> None:
    seen = what_readers_see(ledger)
    report = compact(ledger, plan_compaction(ledger))
    moved = sum(f.segments for f in report.files)
    age(folder / "runs")
    plan = plan_collection(ledger)
    assert (plan.garbage, plan.waiting) == ((), moved), "listed a moment ago"
    with ledger.catalog.write() as connection:
        connection.exec_driver_sql("UPDATE unreferenced SET since = since - 172800000000")
    with open_ledger(folder) as reading:
        reader = reading.reader(factory.RUN, None)
        reader.segments()
        assert gc(ledger) == {"compacted": moved}
        assert all_rows(ledger)["unreferenced"] == []
        assert reader.table("signal_recorded").num_rows
    assert what_readers_see(ledger) == seen
    assert verify_ledger(ledger).ok
    assert gc(ledger, grace_s=0) == {}


def test_a_slow_writer_loses_nothing(
    ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(folder)
    taken: list[dict[str, int]] = []
    real = commit_queue.commit_all

    def slow(*arguments: Any) -> Any:
        # Its files are named and durable; its transaction has not begun.
        assert files(folder) - before
        with open_ledger(folder) as other:
            taken.append(gc(other))
        return real(*arguments)

    monkeypatch.setattr(commit_queue, "commit_all", slow)
    with ledger.writer(factory.RUN, producer="p") as writer:
        writer.append([factory.score(0, 1.0)])
    assert taken == [{}]
    assert verify_ledger(ledger).ok
    # What was never committed goes, once it is old enough.
    name = folder / "runs" / factory.RUN / "hot" / "sample_scored" / ("ab" * 32 + ".arrow")
    name.write_bytes(b"never committed")
    assert gc(ledger) == {}
    age(name)
    assert gc(ledger) == {"never committed": 1}
    assert not name.exists()


def test_what_comes_into_use_between_plan_and_removal_is_spared(
    ledger: Ledger, folder: Path
) -> None:
    report = compact(ledger, plan_compaction(ledger, kinds=["sample_scored"]))
    plan = plan_collection(ledger, grace_s=0)
    first, second = (folder / g.path for g in plan.garbage)
    os.utime(first)  # a writer found its bytes there already, and renewed their time
    with ledger.catalog.write() as connection:
        # Another compaction's file: named again.
        connection.exec_driver_sql(
            "UPDATE locations SET path = ? WHERE path = ?",
            (second.relative_to(folder).as_posix(), report.files[0].path),
        )
    done = collect(ledger, plan, grace_s=0)
    assert (len(done.garbage), done.spared) == (0, 2)
    assert first.exists()
    assert second.exists()


def test_interrupted_writes_and_checkpoints_go(ledger: Ledger, folder: Path) -> None:
    hot = folder / "runs" / factory.RUN / "hot" / "sample_scored"
    for path in (hot / ".tmp-1-2", hot / ".tmp-3-4"):
        path.write_bytes(b"half")
    age(hot / ".tmp-1-2")
    saves = folder / "checkpoints" / factory.RUN
    for name in (".v000007.abc", ".v000008.def", "v000009", "v000010", "mine"):
        (saves / name).mkdir(parents=True)
        (saves / name / ("notes" if name == "mine" else "trainer_state.json")).write_text("{}")
    for name in (".v000007.abc", "v000009", "mine"):
        age(saves / name)
    age(folder / "checkpoints" / "2")
    assert gc(ledger) == {"interrupted write": 1, "interrupted checkpoint": 1}
    assert sorted(p.name for p in saves.iterdir()) == [
        ".v000008.def",
        "mine",
        "v000009",
        "v000010",
    ]
    assert gc(ledger, checkpoints=True) == {"checkpoint that no event names": 1}
    assert sorted(p.name for p in saves.iterdir()) == [".v000008.def", "mine", "v000010"]
    assert sorted(p.name for p in hot.iterdir() if p.name.startswith(".")) == [".tmp-3-4"]
    assert verify_ledger(ledger).ok


def test_a_catalog_from_an_old_copy_takes_nothing_for_garbage(folder: Path) -> None:
    old = (folder / "catalog.sqlite").read_bytes()
    with open_ledger(folder) as ledger, ledger.writer(factory.RUN, producer="p") as writer:
        writer.append([factory.score(0, 1.0)])
    for path in folder.glob("catalog.sqlite*"):
        path.unlink()
    (folder / "catalog.sqlite").write_bytes(old)
    age(folder / "runs")
    with open_ledger(folder) as ledger:
        with pytest.raises(Conflict, match="rebuild-catalog --force"):
            plan_collection(ledger)
        assert not verify_ledger(ledger).ok
    assert main(["rebuild-catalog", "--ledger", str(folder), "--force"]) == 0
    with open_ledger(folder) as ledger:
        assert ledger.run(factory.RUN).head_seq == 103
        assert verify_ledger(ledger).ok
        assert plan_collection(ledger).garbage == ()


def test_a_catalog_from_before_a_compaction_takes_nothing_for_garbage(folder: Path) -> None:
    old = (folder / "catalog.sqlite").read_bytes()
    with open_ledger(folder) as ledger:
        compact(ledger, plan_compaction(ledger))
        assert collect(ledger, plan_collection(ledger, grace_s=0), grace_s=0).garbage
        digest = ledger.content_digest(factory.RUN)
    (folder / "catalog.sqlite").write_bytes(old)
    with open_ledger(folder) as ledger:
        with pytest.raises(Conflict, match="rebuild-catalog --force"):
            plan_collection(ledger, grace_s=0)
        assert not verify_ledger(ledger).ok
    assert main(["rebuild-catalog", "--ledger", str(folder), "--force"]) == 0
    with open_ledger(folder) as ledger:
        assert ledger.content_digest(factory.RUN) == digest
        assert plan_collection(ledger, grace_s=0).garbage == ()


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--ledger", str(folder)]
    assert main(["compact", *where, "--kind", "sample_scored"]) == 0
    capsys.readouterr()
    assert main(["gc", *where]) == 0
    assert "2 more are within the grace period" in capsys.readouterr().out
    assert main(["gc", *where, "--grace", "0", "--dry-run"]) == 0
    assert "would remove 2 things" in capsys.readouterr().out
    assert main(["gc", *where, "--grace", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 2
    assert main(["verify", *where]) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("reason = 'forgotten'", "its reason"),
        ("since = 5", "since when"),
        ("since = since + 86400000000", "since when"),
        ("size_bytes = size_bytes + 1", "its size in bytes"),
        ("path = 'elsewhere/' || path", "its path"),
    ],
)
def test_a_changed_row_of_what_waits_for_collection_is_found(
    ledger: Ledger, folder: Path, change: str, says: str
) -> None:
    compact(ledger, plan_compaction(ledger))
    assert verify_ledger(ledger).ok
    connection = sqlite3.connect(folder / "catalog.sqlite")
    with connection:
        first = "(SELECT min(path) FROM unreferenced)"
        connection.execute(f"UPDATE unreferenced SET {change} WHERE path = {first}")
    connection.close()
    assert says in str(verify_ledger(ledger).findings[0])


def test_damage_of_what_waits_for_collection_is_found(ledger: Ledger, folder: Path) -> None:
    compact(ledger, plan_compaction(ledger))
    path = folder / min(row[0] for row in all_rows(ledger)["unreferenced"])
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert path.name in str(verify_ledger(ledger).findings[0])
