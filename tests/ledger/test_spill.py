"""Spilling: durable on local disk, delivered in order and once, also by the next process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger import Ledger, open_ledger
from ledger.errors import Conflict, Corrupt, FencedOff, InvalidArgument, LedgerError, StorageFailed
from ledger.queue import QueuedWriter
from ledger.queue_items import QueueState, SpilledReceipt
from ledger.spill import SpillFolder
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.faulty import FaultyStore, closing, gaps, scores, store_of, until
from tests.servers.s3 import S3Server


@pytest.fixture
def ledger(quick_path: Path) -> Iterator[Ledger]:
    with open_ledger(quick_path / "ledger", create=True) as opened:
        opened.create_run("r")
        opened.store = FaultyStore(opened.store)  # type: ignore[assignment]
        yield opened


def spilling(ledger: Ledger, spill: Path, **changes: object) -> QueuedWriter:
    options: dict[str, object] = {"policy": "spill", "patience_s": 0.0} | changes
    return ledger.queued_writer("r", producer="a/b", spill=spill, **options)  # type: ignore[arg-type]


def files(spill: Path) -> list[str]:
    return sorted(p.name for p in spill.rglob("*.spill*"))


def spill_some(ledger: Ledger, spill: Path, count: int = 3) -> list[SpilledReceipt]:
    """A queue of a process that was killed with `count` appends on disk, each of two kinds."""
    store_of(ledger).failures = -1
    queue = spilling(ledger, spill)
    futures = [
        queue.append([factory.score(n, 1.0), factory.decide(n, "kept", rollout_step=0)])
        for n in range(count)
    ]
    receipts = [future.result(20) for future in futures]
    with pytest.raises(StorageFailed, match=f"{count} of them lie in"):
        queue.close(0.0)
    store_of(ledger).failures = 0
    assert all(isinstance(r, SpilledReceipt) for r in receipts)
    return receipts  # type: ignore[return-value]


def test_spilled_appends_are_delivered_in_order_when_the_store_is_back(
    ledger: Ledger, quick_path: Path
) -> None:
    store = store_of(ledger)
    told: list[LedgerError] = []
    with spilling(ledger, quick_path / "spill", on_trouble=told.append) as queue:
        queue.append([factory.score(0, 1.0)])
        queue.flush()
        store.failures = -1
        spilled = [queue.append([factory.score(n, 1.0)]) for n in range(1, 6)]
        receipts = [future.result(20) for future in spilled]
        assert all(isinstance(r, SpilledReceipt) for r in receipts)
        stats = queue.stats()
        assert (stats.state, stats.queued_bytes) == (QueueState.SPILLING, 0)
        assert stats.spilled_appends == 5
        assert stats.spilled_bytes == sum(
            p.stat().st_size for p in (quick_path / "spill").rglob("*.spill")
        )
        assert scores(ledger) == [0]
        store.failures = 0
        queue.flush()
        assert queue.state is QueueState.RUNNING
        assert [r.delivered.result(0).first_seq for r in receipts] == [2, 3, 4, 5, 6]  # type: ignore[union-attr]
        after = queue.append([factory.score(6, 1.0)]).result(20)
        assert not isinstance(after, SpilledReceipt)
    assert scores(ledger) == list(range(7))
    assert files(quick_path / "spill") == []
    assert len(told) == 1
    assert gaps(ledger) == []
    assert verify_ledger(ledger).ok


def test_a_store_that_stands_still_makes_the_queue_spill_what_is_under_way_too(
    ledger: Ledger, quick_path: Path
) -> None:
    store = store_of(ledger)
    store.gate.clear()
    told: list[LedgerError] = []
    with spilling(
        ledger,
        quick_path / "spill",
        max_events=2,
        patience_s=60.0,
        block_timeout_s=0.05,
        on_trouble=told.append,
    ) as queue:
        futures = [queue.append([factory.score(n, 1.0)]) for n in range(5)]
        assert [type(f.result(20)).__name__ for f in futures] == ["SpilledReceipt"] * 5
        assert "too slow" in str(told[0])
        store.gate.set()
        queue.flush()
    assert scores(ledger) == list(range(5))
    assert files(quick_path / "spill") == []


def test_the_next_process_delivers_under_the_old_epoch_and_then_begins_its_own(
    ledger: Ledger, quick_path: Path
) -> None:
    spill = quick_path / "spill"
    spill_some(ledger, spill)
    # One of them had reached the ledger, but the process was killed before it knew.
    folder = SpillFolder(spill, ledger.ledger_id, "r", "a/b")
    first = folder.files()[0]
    tables = folder.read(first)[1]
    ledger.writer("r", producer="a/b", epoch=1).append_tables(tables, producer_seq=0)
    store_of(ledger).failures = -1
    with pytest.raises(StorageFailed, match="faulty"):
        spilling(ledger, spill)
    assert len(files(spill)) == 3 - 1
    store_of(ledger).failures = 0
    with spilling(ledger, spill) as queue:
        assert queue.epoch == 2
        assert scores(ledger) == [0, 1, 2]
        assert files(spill) == []
        queue.append([factory.score(3, 1.0)])
    assert scores(ledger) == [0, 1, 2, 3]
    with ledger.catalog.read() as connection:
        keys = connection.exec_driver_sql(
            "select epoch, producer_seq from commits order by first_seq"
        ).fetchall()
    assert [tuple(key) for key in keys] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert gaps(ledger) == []


def test_one_process_at_a_time_has_a_spill_folder(ledger: Ledger, quick_path: Path) -> None:
    with spilling(ledger, quick_path / "spill"), pytest.raises(Conflict, match="another process"):
        spilling(ledger, quick_path / "spill")
    with spilling(ledger, quick_path / "spill") as queue:
        assert queue.epoch == 2
    with pytest.raises(InvalidArgument, match="with a folder"):
        ledger.queued_writer("r", producer="p", policy="spill")
    with pytest.raises(InvalidArgument, match="'halt'"):
        ledger.queued_writer("r", producer="p", policy="halt")  # type: ignore[arg-type]


def test_what_a_successor_fenced_off_is_a_gap_and_stays_to_be_looked_at(
    ledger: Ledger, quick_path: Path
) -> None:
    spill = quick_path / "spill"
    spill_some(ledger, spill)
    ledger.writer("r", producer="a/b").append([factory.score(0, 0.5)])
    for _ in range(2):  # the second one must not say it again
        with spilling(ledger, spill) as queue:
            queue.flush()
        assert scores(ledger) == [0]
        (gap,) = gaps(ledger)
        assert (gap["producer"], gap["epoch"]) == ("a/b", 1)
        assert (gap["first_producer_seq"], gap["last_producer_seq"]) == (0, 2)
        assert dict(zip(gap["kinds"], gap["counts"], strict=True)) == {
            "sample_scored": 3,
            "sample_decided": 3,
        }
        assert "newer writer" in gap["reason"]
    aside = sorted(spill.rglob("set-aside/*"))
    assert len(aside) == 3
    assert verify_ledger(ledger).ok


def test_a_crash_between_the_gap_and_its_files_records_nothing_twice(
    ledger: Ledger, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = quick_path / "spill"
    spill_some(ledger, spill)
    ledger.writer("r", producer="a/b")
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise StorageFailed("killed here")

        patch.setattr(SpillFolder, "set_aside", killed)
        queue = spilling(ledger, spill)
        with pytest.raises(StorageFailed):
            queue.close(0.3)
    assert len(gaps(ledger)) == 1
    with spilling(ledger, spill) as queue:
        queue.flush()
    assert len(gaps(ledger)) == 1
    assert len(list(spill.rglob("set-aside/*"))) == 3


def test_fenced_off_while_spilling(ledger: Ledger, quick_path: Path) -> None:
    store_of(ledger).failures = -1
    queue = spilling(ledger, quick_path / "spill")
    with closing(queue):
        spilled = queue.append([factory.score(0, 1.0)]).result(20)
        assert isinstance(spilled, SpilledReceipt)
        ledger.writer("r", producer="a/b")
        store_of(ledger).failures = 0
        with pytest.raises(FencedOff):
            spilled.delivered.result(20)
        with pytest.raises(FencedOff):
            queue.append([factory.score(1, 1.0)])
        with pytest.raises(FencedOff):
            queue.close()
    (gap,) = gaps(ledger)
    assert (gap["first_producer_seq"], gap["counts"]) == (0, [1])
    # The successor was not disturbed.
    ledger.writer("r", producer="a/b", epoch=2).append([factory.score(2, 1.0)])


@pytest.mark.parametrize("where", ["rows", "header", "name", "cut", "pickle"])
def test_a_damaged_spilled_file_becomes_a_gap_and_the_others_are_delivered(
    ledger: Ledger, quick_path: Path, where: str
) -> None:
    spill = quick_path / "spill"
    spill_some(ledger, spill)
    trap = quick_path / "executed"
    path = sorted(spill.rglob("*.spill"))[1]
    raw = bytearray(path.read_bytes())
    if where == "rows":
        raw[-100] ^= 1
    elif where == "header":
        raw[200] ^= 1
    elif where == "cut":
        del raw[len(raw) // 2 :]
    elif where == "pickle":
        raw[:] = factory.pickle_that_touches(trap)
    else:
        path = path.rename(path.with_name(path.name.replace("-000000000001", "-000000000007")))
    path.write_bytes(raw)
    number = 7 if where == "name" else 1
    with spilling(ledger, spill) as queue:
        queue.flush()
    assert not trap.exists()
    assert scores(ledger) == [0, 2]
    (gap,) = gaps(ledger)
    assert (gap["first_producer_seq"], gap["last_producer_seq"]) == (number, number)
    assert "damaged" in gap["reason"]
    if where in ("rows", "cut"):
        assert gap["counts"] == [1, 1]
    else:
        assert "not known any more" in gap["reason"]


def test_damage_found_while_catching_up_is_recorded_and_stops_the_queue(
    ledger: Ledger, quick_path: Path
) -> None:
    store = store_of(ledger)
    store.failures = -1
    queue = spilling(ledger, quick_path / "spill")
    with closing(queue):
        spilled = [queue.append([factory.score(n, 1.0)]).result(20) for n in range(3)]
        path = spilled[1].file.path  # type: ignore[union-attr]
        raw = bytearray(path.read_bytes())
        raw[-80] ^= 1
        path.write_bytes(raw)
        store.failures = 0
        until(lambda: queue.state is QueueState.STOPPED)
        with pytest.raises(Corrupt, match="not what was written"):
            queue.append([factory.score(3, 1.0)])
        (gap,) = gaps(ledger)
        assert (gap["first_producer_seq"], gap["counts"]) == (1, [1])
        queue.resume()
        queue.close()
    assert scores(ledger) == [0, 2]


def test_a_full_spill_folder_stops_the_queue_and_pretends_nothing(
    ledger: Ledger, quick_path: Path
) -> None:
    store = store_of(ledger)
    store.failures = -1
    queue = spilling(ledger, quick_path / "spill", max_spill_bytes=12_000, block_timeout_s=1.0)
    with closing(queue):
        taken = []
        with pytest.raises(StorageFailed, match="spill folder is full"):  # noqa: PT012
            for n in range(20):
                queue.append([factory.score(n, 1.0)]).result(20)
                taken.append(n)
        assert 0 < len(taken) < 5
        assert queue.state is QueueState.STOPPED
        store.failures = 0
        queue.resume()
        queue.append([factory.score(50, 1.0)])
        queue.close()
    assert scores(ledger) == [*taken, 50]


def test_given_up_spilled_events_are_recorded_also_by_the_next_process(
    ledger: Ledger, quick_path: Path
) -> None:
    spill = quick_path / "spill"
    store_of(ledger).failures = -1
    queue = spilling(ledger, spill, max_spill_bytes=6_000, block_timeout_s=0.01)
    queue.append([factory.score(0, 1.0)]).result(20)
    with contextlib.suppress(StorageFailed):
        for n in range(1, 9):
            queue.append([factory.score(n, 1.0)]).result(20)
    queue.abandon("the disk is full")
    with pytest.raises(StorageFailed):
        queue.close(0.0)
    store_of(ledger).failures = 0
    assert all(name.endswith(".abandoned") for name in files(spill))
    with spilling(ledger, spill) as queue:
        queue.flush()
    assert scores(ledger) == []
    (gap,) = gaps(ledger)
    assert gap["first_producer_seq"] == 0
    assert "given up" in gap["reason"]


def test_a_spilled_file_is_synced_then_named_then_its_folder_is_synced(
    ledger: Ledger, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(ledger).failures = -1
    queue = spilling(ledger, quick_path / "spill")
    with closing(queue):
        queue.append([factory.score(0, 1.0)]).result(20)
        calls: list[str] = []
        names: dict[int, str] = {}
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}

        def opened(path: str, *rest: int) -> int:
            descriptor: int = real["open"](path, *rest)
            names[descriptor] = Path(path).name
            return descriptor

        def named(source: str, target: str) -> None:
            calls.append(f"rename to {Path(target).suffix}")
            real["rename"](source, target)

        def recorded(name: str) -> object:
            def call(descriptor: int, *rest: object) -> object:
                what = names[descriptor]
                calls.append(f"{name} {'tmp' if what.startswith('.tmp-') else what}")
                return real[name](descriptor, *rest)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opened)
            patch.setattr(os, "rename", named)
            patch.setattr(os, "write", recorded("write"))
            patch.setattr(os, "fsync", recorded("fsync"))
            acknowledged = queue.append([factory.score(1, 1.0)])
            assert acknowledged.done()
        assert isinstance(acknowledged.result(0), SpilledReceipt)
    kept = [call for call in calls if not call.startswith("write")]
    assert kept == ["fsync tmp", "rename to .spill", f"fsync {'a%2Fb'}"]
    assert calls.index("fsync tmp") > max(i for i, c in enumerate(calls) if c == "write tmp")


def test_kills_at_any_moment_lose_nothing_that_was_acknowledged(quick_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ledger.spill_child", str(quick_path), "150", "2.5"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) >= 4
    for kill in kills:
        told, there = kill["told"], kill["there"]
        # Appends were made one after the other: at most the one under way is there untold.
        assert there in ([*told, 99], [*told, len(told), 99]), kill
        assert kill["sound"], kill
        assert kill["after"], kill
        assert not kill["gaps"], kill
        assert kill["left"] == [], kill


def test_an_s3_store_that_refuses_for_a_while(quick_path: Path, s3_server: S3Server) -> None:
    uri = f"s3://{s3_server.bucket()}/ledger"
    catalog = f"sqlite:///{quick_path / 'catalog.sqlite'}"
    options = s3_server.storage_options
    with open_ledger(uri, create=True, catalog=catalog, storage_options=options) as ledger:
        ledger.create_run("r")
        with spilling(ledger, quick_path / "spill") as queue:
            s3_server.fail("PUT", "/hot/", status=403, code="AccessDenied", times=3)
            futures = [queue.append([factory.score(n, 1.0)]) for n in range(3)]
            receipts = [future.result(60) for future in futures]
            assert isinstance(receipts[0], SpilledReceipt)
            queue.flush()
            last = queue.stats().last_error
            assert last is not None
            assert "testing" not in last
        assert scores(ledger) == [0, 1, 2]
        assert files(quick_path / "spill") == []
        assert verify_ledger(ledger).ok
