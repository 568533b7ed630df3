"""Rows that a rule retires are gone, said so, and missed by nothing that does not need them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ledger import Ledger, open_ledger
from ledger.cli import main
from ledger.collect import collect, plan_collection
from ledger.errors import Conflict, InvalidArgument, NoLongerKept, NotFound
from ledger.events import RoutingRecorded, RowsRetired
from ledger.follow import events_after
from ledger.place import place_of
from ledger.rebuild_catalog import rebuild_catalog
from ledger.retention import Rule, apply_retention, plan_retention
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.keeping import all_rows

KIND = "routing_recorded"


def routing(index: int) -> RoutingRecorded:
    ids = np.arange(8, dtype=np.uint8)
    return RoutingRecorded(
        index=index,
        segment=0,
        start=0,
        rows=2,
        layers=2,
        topk=2,
        num_experts=8,
        dtype="uint8",
        expert_ids=ids.tobytes(),
    )


def build(folder: Path) -> None:
    """Versions 0 to 5 on main; routing of samples 2v and 2v+1 after each; a fork at version 2."""
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="p") as writer:
            for version in range(6):
                parent = version - 1 if version else None
                writer.append([factory.weights(version, parent, parent)])
                writer.append([routing(2 * version), routing(2 * version + 1)])
                if version == 2:
                    fork_seq = ledger.run("r").head_seq
        fork = next(e for c in factory.story() for e in c.events if e.KIND == "branch_forked")
        fork = fork.evolve(branch="side", fork_seq=fork_seq, weight_version=2)
        with ledger.fork("r", fork, producer="p") as writer:  # type: ignore[arg-type]
            writer.append([routing(100), routing(101)])
            writer.append([factory.weights(1_000_003, 2, 0)])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing") / "ledger"
    build(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    with open_ledger(folder) as opened:
        yield opened


def retire(ledger: Ledger, **limits: object) -> dict[str, int]:
    report = apply_retention(ledger, plan_retention(ledger, Rule(KIND, **limits)))  # type: ignore[arg-type]
    return {group.branch: group.rows for group in report.groups}


def left(ledger: Ledger, branch: str | None = None) -> list[int]:
    return list(ledger.reader("r", branch).table(KIND, ["index"])["index"].to_pylist())


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        # The fork sees main's rows up to version 2: they are new there.
        ({"keep_versions": 2}, {"main": 6}),
        ({"keep_versions": 2, "branch": "main"}, {"main": 8}),
        ({"keep_versions": 1, "branch": "side"}, {"side": 2}),
        ({"keep_versions": 9}, {}),
        ({"before_version": 1}, {"main": 2}),
        ({"before_version": 4, "branch": "main"}, {"main": 8}),
        ({"older_than_days": 1.0}, {}),
        ({"older_than_days": 0.0}, {"main": 12, "side": 2}),
    ],
)
def test_a_rule_takes_whole_segments_that_are_old_wherever_they_are_seen(
    ledger: Ledger, limits: dict[str, object], gone: dict[str, int]
) -> None:
    report = plan_retention(ledger, Rule(KIND, **limits))  # type: ignore[arg-type]
    assert {g.branch: g.rows for g in report.groups} == gone
    assert report.kept_rows == 14 - sum(gone.values())


def test_retired_rows_are_gone_and_everything_else_is_as_before(
    ledger: Ledger, folder: Path
) -> None:
    digests = {b: ledger.content_digest("r", b) for b in ("main", "side")}
    head = ledger.run("r").head_seq
    assert retire(ledger, keep_versions=2, branch="main") == {"main": 8}
    for opened in (ledger, open_ledger(folder)):
        assert left(opened) == [8, 9, 10, 11, 100, 101]
        reader = opened.reader("r", None)
        assert reader.retired() == {KIND: 8}
        assert opened.reader("r", "side").retired() == {KIND: 6}
        # Views work with the rows that remain.
        assert reader.sql("SELECT count(*) AS n FROM routing_recorded")["n"].to_pylist() == [6]
        assert {b: opened.content_digest("r", b) for b in digests} == digests
        assert verify_ledger(opened).ok
    (event,) = ledger.reader("r").table("rows_retired").to_pylist()
    assert event["rule"] == "keep routing_recorded of the newest 2 versions on branch 'main'"
    assert event["seq"] == head + 1
    assert sum(event["row_counts"]) == len(event["row_hashes"]) == 8
    # What needs the rows says so, and by which event they went.
    with pytest.raises(NoLongerKept, match=f"rows_retired at seq {head + 1}"):
        ledger.reader("r").require_kept(KIND, "index", [3])
    ledger.reader("r").require_kept(KIND, "index", [8, 100, 10**6])
    # Again there is nothing to do; the files go with collection, and nothing changes.
    assert retire(ledger, keep_versions=2, branch="main") == {}
    plan = plan_collection(ledger, grace_s=0)
    assert [g.why for g in plan.garbage] == ["retired"] * 4
    assert len(collect(ledger, plan, grace_s=0).garbage) == 4
    assert verify_ledger(ledger).ok
    assert left(ledger) == [8, 9, 10, 11, 100, 101]


def test_training_on_retired_routing_says_so_instead_of_going_on_without_it(
    ledger: Ledger,
) -> None:
    from trainer.batch_routing import read_routing

    lengths = np.full(2, 3, np.int64)
    routing = read_routing(ledger.reader("r"), np.array([2, 3]), lengths)
    assert routing is not None
    first, second = routing.expert_ids
    assert first.shape == second.shape == (2, 2, 2)
    retire(ledger, before_version=2, branch="main")
    for indices in ([2, 3], [3, 4], [4, 2]):
        with pytest.raises(NoLongerKept, match="such as replaying these steps"):
            read_routing(ledger.reader("r"), np.array(indices), lengths)
    assert read_routing(ledger.reader("r"), np.array([4, 5]), lengths) is not None
    assert read_routing(ledger.reader("r"), np.array([500, 501]), lengths) is None


def test_a_segment_that_is_missing_without_its_event_is_a_loss(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        retire(ledger, before_version=1)
    with open_ledger(folder) as ledger, ledger.catalog.write() as connection:
        connection.exec_driver_sql("DELETE FROM locations WHERE first_seq = 5")
    with open_ledger(folder) as ledger:
        assert any("a row in locations" in str(f) for f in verify_ledger(ledger).findings)
        with ledger.catalog.write() as connection:
            connection.exec_driver_sql("INSERT INTO tombstones VALUES ('r', 5, 19)")
        assert not verify_ledger(ledger).ok
        with ledger.catalog.write() as connection:
            connection.exec_driver_sql("DELETE FROM tombstones")
        assert not verify_ledger(ledger).ok


def test_a_catalog_made_again_knows_what_was_retired(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        retire(ledger, keep_versions=2, branch="main")
        retire(ledger, keep_versions=1, branch="main")
        rows = all_rows(ledger, "exports", "unreferenced")
        unreferenced = {row[0] for row in all_rows(ledger)["unreferenced"]}
    assert len(rows["tombstones"]) == 5
    for path in folder.glob("catalog.sqlite*"):
        path.unlink()
    assert rebuild_catalog(place_of(LocalStore(folder), None)).ok
    with open_ledger(folder) as ledger:
        assert all_rows(ledger, "exports", "unreferenced") == rows
        assert {row[0] for row in all_rows(ledger)["unreferenced"]} == unreferenced
        assert verify_ledger(ledger).ok


def test_two_at_once_retire_once(ledger: Ledger, folder: Path) -> None:
    plan = plan_retention(ledger, Rule(KIND, before_version=1))
    with open_ledger(folder) as other:
        retire(other, before_version=1)
    with pytest.raises(Conflict, match="retired already"):
        apply_retention(ledger, plan)
    assert verify_ledger(ledger).ok


def test_what_must_stay_stays(ledger: Ledger) -> None:
    for kind in ("weights_published", "step_committed", "rows_retired", "run_started", "nonsense"):
        with pytest.raises(InvalidArgument, match="a kind whose rows may go"):
            Rule(kind, keep_versions=1)
    for limits in ({}, {"keep_versions": 0}, {"keep_versions": 1, "before_version": 1}):
        with pytest.raises(InvalidArgument, match="one of keep_versions"):
            Rule(KIND, **limits)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="version 77"):
        plan_retention(ledger, Rule(KIND, before_version=77))
    forged = RowsRetired(
        kind="weights_published",
        first_seqs=np.array([1]),
        row_counts=np.array([1]),
        row_hashes=[],
        size_bytes=0,
        rule="mine",
    )
    head = ledger.run("r").head_seq
    writer = ledger.writer("r", producer="p")
    for wrong in (
        forged,
        forged.evolve(kind=KIND),
        forged.evolve(kind=KIND, first_seqs=np.array([2]), row_counts=np.array([3])),
        forged.evolve(kind=KIND, first_seqs=np.array([2, 2]), row_counts=np.array([2, 2])),
        forged.evolve(kind=KIND, first_seqs=np.array([999]), row_counts=np.array([2])),
    ):
        with pytest.raises(Conflict, match="rows were not retired"):
            writer.append([wrong])
    assert ledger.run("r").head_seq == head
    assert verify_ledger(ledger).ok


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["retain", "--ledger", str(folder), "--kind", KIND]
    assert main([*arguments, "--keep-versions", "2", "--dry-run"]) == 0
    assert "would retire 6 rows" in capsys.readouterr().out
    assert main([*arguments, "--older-than", "0", "--branch", "side", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["rows"] == 2
    assert main([*arguments, "--keep-versions", "2"]) == 0
    assert "ledger gc" in capsys.readouterr().out
    assert main(arguments) == 2
    assert main(["retain", "--ledger", str(folder), "--kind", "x", "--keep-versions", "1"]) == 2
    assert main(["verify", "--ledger", str(folder)]) == 0


def test_a_trajectory_is_shown_without_masks_that_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory.write_story(tmp_path / "story").close()
    shown = ["show", "--ledger", str(tmp_path / "story"), "8"]
    assert main(shown) == 0
    before = capsys.readouterr().out
    assert " 14     1  " in before
    assert "no longer kept" not in before
    assert (
        main(
            [
                *("retain", "--ledger", str(tmp_path / "story"), "--kind", "signal_recorded"),
                *("--before-version", "1"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(shown) == 0
    after = capsys.readouterr().out
    assert "version 0 → 1; what it used is no longer kept" in after
    assert not re.search(r" 14     [01]  ", after)
    # Of a sample that no step trained it is known.
    assert main([*shown[:-1], "17"]) == 0
    assert " 0  " in capsys.readouterr().out


def test_who_follows_a_run_is_told_of_rows_that_are_gone(ledger: Ledger, folder: Path) -> None:
    news = events_after(ledger, "r", kinds=[KIND])
    assert next(news).table is not None
    with open_ledger(folder) as other:
        retire(other, before_version=2, branch="main")
        collect(other, plan_collection(other, grace_s=0), grace_s=0)
    # What it looked up before is found to be gone when it comes to it.
    tables = {one.first_seq: one.table for one in news}
    assert tables[5] is None
    assert tables[8] is not None
    assert [one.table is None for one in events_after(ledger, "r", kinds=[KIND])][:3] == [
        True,
        True,
        False,
    ]
