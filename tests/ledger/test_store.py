"""Opening, runs, branches, versions, allocation, the commit protocol."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import migrations
from ledger import Ledger, open_ledger
from ledger.catalog.records import Receipt
from ledger.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    FencedOff,
    IdempotencyConflict,
    IncompatibleFormat,
    InvalidArgument,
    InvalidEvent,
    NotFound,
    StorageFailed,
)
from ledger.events import BranchForked
from ledger.verify import verify_ledger
from tests.ledger import factory


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with open_ledger(tmp_path / "ledger", create=True) as opened:
        opened.create_run("r")
        yield opened


def fork(name: str, seq: int, version: int = 0, parent: str = "main") -> BranchForked:
    return BranchForked(
        branch=name,
        parent_branch=parent,
        fork_seq=seq,
        weight_version=version,
        settings="{}",
        data="recorded",
    )


def test_opening_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="ledger init"):
        open_ledger(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="ledger init"):
        open_ledger(tmp_path)
    open_ledger(tmp_path / "l", create=True).close()
    with open_ledger((tmp_path / "l").as_uri()) as again, open_ledger(tmp_path / "l") as other:
        assert again.ledger_id == other.ledger_id
        assert again.uri == (tmp_path / "l").as_uri()
    with open_ledger(str(tmp_path / "l"), create=True) as kept:
        assert kept.ledger_id == again.ledger_id
    with pytest.raises(InvalidArgument, match="not known"):
        open_ledger("ftp://host/x")


def test_opening_something_else(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "readme.txt").write_text("x")
    for create in (False, True):
        with pytest.raises(IncompatibleFormat):
            open_ledger(other, create=create)
    (other / "catalog.sqlite").write_bytes(b"no database" * 1000)
    for create in (False, True):
        with pytest.raises(IncompatibleFormat):
            open_ledger(other, create=create)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    connection = sqlite3.connect(foreign / "catalog.sqlite")
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    for create in (False, True):
        with pytest.raises(IncompatibleFormat):
            open_ledger(foreign, create=create)


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("UPDATE meta SET value = '2' WHERE key = 'format'", "newer version"),
        ("UPDATE alembic_version SET version_num = '9999'", "newer version"),
        ("UPDATE alembic_version SET version_num = '0000'", "not known"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, statement: str, text: str) -> None:
    open_ledger(tmp_path / "l", create=True).close()
    connection = sqlite3.connect(tmp_path / "l" / "catalog.sqlite")
    with connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(IncompatibleFormat, match=text):
        open_ledger(tmp_path / "l")


def test_a_read_only_place_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed):
        open_ledger(tmp_path / "file" / "l", create=True)


def test_every_commit_is_synced(ledger: Ledger) -> None:
    with ledger.catalog.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert migrations.current(connection) == migrations.HEAD


def test_runs(ledger: Ledger) -> None:
    assert ledger.run().run_id == "r"
    with pytest.raises(AlreadyExists):
        ledger.create_run("r")
    ledger.create_run("s")
    assert [r.run_id for r in ledger.runs()] == ["r", "s"]
    with pytest.raises(NotFound, match=r"\['r', 's'\]"):
        ledger.run()
    with pytest.raises(NotFound, match="'x'"):
        ledger.run("x")
    for name in ("", "a/b", "..", ".x", "a b", "x" * 129):
        with pytest.raises(InvalidArgument):
            ledger.create_run(name)


def test_appends_are_numbered_without_gaps_and_read_back(ledger: Ledger) -> None:
    with ledger.writer("r", producer="p") as writer:
        first = writer.append([factory.weights(0, None, None)])
        mixed = [factory.score(0, 1.0), factory.responses(0)[0], factory.score(1, 0.0)]
        second = writer.append(mixed)
    assert (first.first_seq, first.last_seq) == (1, 1)
    assert (second.first_seq, second.last_seq) == (2, 4)
    assert ledger.run("r").head_chain == second.chain
    reader = ledger.reader("r")
    assert reader.head_seq == 4
    assert reader.kinds() == ["sample_scored", "segment_generated", "weights_published"]
    scores = reader.table("sample_scored", ["index", "run_id", "branch", "seq"])
    assert scores.to_pylist() == [
        {"index": 0, "run_id": "r", "branch": "main", "seq": 2},
        {"index": 1, "run_id": "r", "branch": "main", "seq": 3},
    ]
    assert reader.table("segment_generated")["seq"].to_pylist() == [4]
    assert reader.table("prompt_issued").num_rows == 0
    with pytest.raises(InvalidArgument, match="nonsense"):
        reader.table("sample_scored", ["nonsense"])
    with pytest.raises(InvalidArgument):
        writer.append(mixed)
    with ledger.writer("r", producer="p") as writer:
        for nothing in ([], ["x"], [object()]):
            with pytest.raises(InvalidArgument):
                writer.append(nothing)  # type: ignore[arg-type]


def test_a_reader_sees_one_state(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    writer.append([factory.score(i, 1.0) for i in range(3)])
    before = ledger.reader("r")
    writer.append([factory.score(i, 1.0) for i in range(3, 5)])
    assert before.table("sample_scored").num_rows == 3
    assert ledger.reader("r").table("sample_scored").num_rows == 5
    assert before.table("sample_scored").num_rows == 3
    for seq in range(6):
        found = ledger.reader("r", as_of=seq).table("sample_scored")["index"].to_pylist()
        assert found == list(range(seq))
    assert ledger.reader("r").table("sample_scored").num_rows == 5
    with pytest.raises(NotFound, match="0 to 5"):
        ledger.reader("r", as_of=6)


def test_ranges_leave_segments_out(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    for low in (0, 10, 20):
        writer.append([factory.score(i, 1.0) for i in range(low, low + 4)])
    reader = ledger.reader("r")
    found = reader.table("sample_scored", where={"index": (12, 20)})
    assert found["index"].to_pylist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert reader.table("sample_scored", where={"index": (4, 9)}).num_rows == 0
    assert reader.table("sample_scored").num_rows == 12
    with pytest.raises(InvalidArgument, match="reward"):
        reader.table("sample_scored", where={"reward": (0, 1)})


def test_the_same_append_twice_is_one(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    events = [factory.score(0, 1.0)]
    receipt = writer.append(events, producer_seq=0)
    assert writer.append(events, producer_seq=0) == receipt
    again = ledger.writer("r", producer="p", epoch=writer.epoch)
    assert again.append(events, producer_seq=0) == receipt
    assert ledger.run("r").head_seq == 1
    with pytest.raises(IdempotencyConflict) as caught:
        writer.append([factory.score(0, 0.0)], producer_seq=0)
    hashes = [line.split("content ")[1][:64] for line in str(caught.value).splitlines()[1:3]]
    assert len(set(hashes)) == 2
    assert all(len(bytes.fromhex(h)) == 32 for h in hashes)
    assert writer.append([factory.score(0, 0.0)]) == Receipt(2, 2, ledger.run("r").head_chain)


def test_an_older_epoch_is_fenced_off(ledger: Ledger) -> None:
    old = ledger.writer("r", producer="p")
    old.append([factory.score(0, 1.0)])
    new = ledger.writer("r", producer="p")
    other = ledger.writer("r", producer="q")
    with pytest.raises(FencedOff, match="epoch 2"):
        old.append([factory.score(1, 1.0)])
    new.append([factory.score(1, 1.0)])
    other.append([factory.score(2, 1.0)])
    assert ledger.reader("r").table("sample_scored")["index"].to_pylist() == [0, 1, 2]


def test_versions_form_a_tree(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    writer.append([factory.weights(1, 0, 0), factory.weights(2, 1, 1)])
    assert [(v.weight_version, v.parent_version, v.seq) for v in ledger.versions("r")] == [
        (0, None, 1),
        (1, 0, 2),
        (2, 1, 3),
    ]
    for bad, text in (
        (factory.weights(1, 0, 0), "there already"),
        (factory.weights(9, 8, 0), "parent"),
        (factory.weights(9, None, 0), "no parent"),
    ):
        with pytest.raises(Conflict, match=text):
            writer.append([bad])
    assert ledger.run("r").head_seq == 3
    assert ledger.version("r", 2).root == ledger.versions("r")[2].root
    ledger.create_run("s")
    ledger.writer("s", producer="p").append([factory.weights(7, None, None)])
    with pytest.raises(NotFound, match=r"(?s)from 0 to 2.*version 7 is in run \['s'\]"):
        ledger.version("r", 7)


def trained(ledger: Ledger, branch: str, step: int, indices: list[int], version: int) -> None:
    writer = ledger.writer("r", branch, producer=branch)
    writer.append(
        [
            factory.step(step, indices, rollout_step=0, version_in=0, version_out=version),
            factory.weights(version, 0, step),
        ]
    )


def test_a_sample_is_trained_once_in_a_lineage(ledger: Ledger) -> None:
    ledger.writer("r", producer="p").append([factory.weights(0, None, None)])
    trained(ledger, "main", 0, [0, 1], 1)
    at = ledger.run("r").head_seq
    trained(ledger, "main", 1, [2, 3], 2)
    with pytest.raises(Conflict, match=r"(?s)sample 2.*step 2 wants it; step 1 on branch 'main'"):
        trained(ledger, "main", 2, [2, 4], 3)
    assert [v.weight_version for v in ledger.versions("r")] == [0, 1, 2]
    ledger.fork("r", fork("b", at), "b")
    with pytest.raises(Conflict, match="sample 1"):
        trained(ledger, "b", 1, [1, 5], 3)
    trained(ledger, "b", 1, [2, 3], 3)  # main trained on them after the fork
    assert verify_ledger(ledger).ok


def test_branches_see_their_ancestors_up_to_the_fork(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    writer.append([factory.score(i, 1.0) for i in range(4)])  # seq 2 to 5
    b = ledger.fork("r", fork("b", 3), "pb")
    writer.append([factory.score(4, 1.0)])
    b.append([factory.score(10, 1.0)])
    at = ledger.run("r").head_seq
    c = ledger.fork("r", fork("c", at, parent="b"), "pc")
    b.append([factory.score(11, 1.0)])
    c.append([factory.score(20, 1.0)])

    def seen(branch: str | None, **options: Any) -> list[int]:
        found = ledger.reader("r", branch, **options).table("sample_scored")
        return found["index"].to_pylist()  # type: ignore[no-any-return]

    assert seen("main") == [0, 1, 2, 3, 4]
    assert seen("b") == [0, 1, 10, 11]
    assert seen("c") == [0, 1, 10, 20]
    assert seen("c", as_of=2) == [0]
    assert seen(None) == [0, 1, 2, 3, 4, 10, 11, 20]
    table = ledger.reader("r", "c").table("sample_scored")
    assert table["branch"].to_pylist() == ["main", "main", "b", "c"]
    assert ledger.reader("r", "c").table("branch_forked")["branch"].to_pylist() == ["b", "c"]
    names = [(i.name, i.parent, i.fork_seq, i.head_seq) for i in ledger.branches("r")]
    assert names == [("main", None, None, 7), ("b", "main", 3, 10), ("c", "b", 8, 11)]
    with pytest.raises(NotFound, match=r"\['main', 'b', 'c'\]"):
        ledger.branch("r", "d")
    with pytest.raises(NotFound):
        ledger.reader("r", "d")
    with pytest.raises(NotFound):
        ledger.writer("r", "d", producer="p")


def test_a_fork_that_cannot_be_is_refused(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    ledger.fork("r", fork("b", 1), "q")
    for bad, error in (
        (fork("b", 1), AlreadyExists),
        (fork("c", 99), Conflict),
        (fork("c", 1, version=5), Conflict),
        (fork("c", 1, parent="x"), NotFound),
        (fork("c/d", 1), InvalidArgument),
    ):
        with pytest.raises(error):
            ledger.fork("r", bad, "q")
    with pytest.raises(InvalidEvent, match="'c'"):
        writer.append([fork("c", 1)])
    with pytest.raises(InvalidEvent, match="run_id"):
        writer.append([factory.started()])
    assert [b.name for b in ledger.branches("r")] == ["main", "b"]


def test_the_content_digest_ignores_names_order_and_segments(tmp_path: Path) -> None:
    digests = []
    for number, size in enumerate((1, 2, 6)):
        with open_ledger(tmp_path / str(number), create=True) as ledger:
            ledger.create_run(f"run-{number}")
            writer = ledger.writer(f"run-{number}", producer=f"p{number}")
            scores = [factory.score(i, i / 4) for i in range(6)]
            if number == 1:
                scores = scores[::-1]
            for start in range(0, 6, size):
                writer.append(scores[start : start + size])
            digests.append(ledger.content_digest(f"run-{number}", "main"))
            changed = dataclasses.replace(scores[0], reward=float(np.nextafter(0.1, 1)))
            writer.append([changed])
            assert ledger.content_digest(f"run-{number}", "main") not in digests
    assert digests[0] == digests[1] == digests[2]


def test_foreign_exceptions_do_not_come_out(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "l", create=True) as ledger:
        ledger.create_run("r")
        writer = ledger.writer("r", producer="p")
        with ledger.catalog.write() as connection:
            connection.exec_driver_sql("DROP TABLE locations")
        with pytest.raises(Corrupt, match="locations"):
            writer.append([factory.score(0, 1.0)])
        assert ledger.run("r").head_seq == 0
