"""A queued writer: at once, in order, exactly once; in trouble the caller learns it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from ledger import Ledger, open_ledger
from ledger.catalog.driver import Driver
from ledger.errors import (
    FencedOff,
    InvalidArgument,
    InvalidEvent,
    LedgerError,
    StorageFailed,
)
from ledger.queue_items import QueueState, SpilledReceipt
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.factory import ints
from tests.ledger.faulty import FaultyStore, closing, gaps, scores, store_of, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ledger(quick_path: Path) -> Iterator[Ledger]:
    with open_ledger(quick_path / "ledger", create=True) as opened:
        opened.create_run("r")
        opened.store = FaultyStore(opened.store)  # type: ignore[assignment]
        yield opened


def test_appends_return_at_once_and_keep_their_order(ledger: Ledger) -> None:
    store = store_of(ledger)
    store.gate.clear()
    appended = []
    with ledger.queued_writer("r", producer="p") as queue:
        futures = []
        for turn in range(30):
            events: list[Any] = [factory.score(2 * turn, 1.0)]
            if turn % 3 == 0:
                events.append(factory.score(2 * turn + 1, 0.5))
            if turn % 5 == 0:
                events.append(factory.decide(2 * turn, "kept", rollout_step=0))
            appended.append([(e.KIND, e.index) for e in events])
            futures.append(queue.append(events))
        assert queue.stats().queued_appends == 30
        assert not any(f.done() for f in futures)
        store.gate.set()
        queue.flush()
        stats = queue.stats()
    assert (stats.queued_appends, stats.queued_bytes, stats.state) == (0, 0, "running")
    assert (stats.stored_appends, stats.stored_events) == (30, sum(map(len, appended)))
    found = sorted(
        (row["seq"], kind, row["index"])
        for kind in ("sample_scored", "sample_decided")
        for row in ledger.reader("r").table(kind).to_pylist()
    )
    # One by one as they were appended, although neighbours shared commits ...
    assert [(kind, index) for _, kind, index in found] == [e for some in appended for e in some]
    with ledger.catalog.read() as connection:
        commits = connection.execute(sa.text("select count(*) from commits")).scalar()
    assert commits is not None
    assert commits < 20
    # ... and each append knows its own numbers.
    first = 1
    for events, future in zip(appended, futures, strict=True):
        receipt = future.result(0)
        assert not isinstance(receipt, SpilledReceipt)
        assert (receipt.first_seq, receipt.last_seq) == (first, first + len(events) - 1)
        first += len(events)
    assert verify_ledger(ledger).ok
    with pytest.raises(InvalidArgument, match="closed"):
        queue.append([factory.score(99, 1.0)])


def test_what_breaks_a_rule_by_itself_is_refused_in_the_caller(ledger: Ledger) -> None:
    bad = factory.segment(0, ints(5, -1), rollout_step=0)
    with ledger.queued_writer("r", producer="p") as queue:
        with pytest.raises(InvalidEvent, match="row 0, field 'tokens'"):
            queue.append([bad])
        with pytest.raises(InvalidEvent, match="field 'run_id'"):
            queue.append([factory.started()])
        with pytest.raises(InvalidArgument, match="at least one"):
            queue.append([])
        assert queue.stats().queued_appends == 0
    assert ledger.run("r").head_seq == 0


def test_the_events_may_be_changed_after_the_append(ledger: Ledger) -> None:
    store_of(ledger).gate.clear()
    with ledger.queued_writer("r", producer="p") as queue:
        queue.append([factory.weights(0, None, None)])
        event = factory.segment(0, ints(5, 6, 7), rollout_step=0)
        queue.append([event])
        event.tokens[:] = 0
        event.rollout_log_probs[:] = np.nan
        store_of(ledger).gate.set()
    assert ledger.reader("r").table("segment_generated")["tokens"].to_pylist() == [[5, 6, 7]]


def test_what_the_ledger_refuses_stops_the_queue_and_nothing_else_fails(ledger: Ledger) -> None:
    store_of(ledger).gate.clear()
    told: list[LedgerError] = []
    queue = ledger.queued_writer("r", producer="p", on_trouble=told.append)
    with closing(queue):
        queue.append([factory.weights(0, None, None)])
        until(store_of(ledger).blocked.is_set)
        good = queue.append([factory.segment(0, ints(5), rollout_step=0)])
        bad = queue.append([factory.segment(1, ints(5), rollout_step=7)])
        later = queue.append([factory.segment(2, ints(5), rollout_step=0)])
        store_of(ledger).gate.set()
        with pytest.raises(InvalidEvent, match=r"(?s)row 0, field 'span_versions'.*found:    7"):
            bad.result(20)
        assert good.result(0)
        with pytest.raises(InvalidEvent):
            later.result(20)
        assert queue.state is QueueState.STOPPED
        with pytest.raises(InvalidEvent, match="its queue has stopped"):
            queue.append([factory.score(0, 1.0)])
        with pytest.raises(InvalidEvent):
            queue.flush()
        # Another writer publishes the version: now the very same append is right.
        ledger.writer("r", producer="q").append([factory.weights(7, 0, None)])
        again = queue.resume()
        queue.flush()
        receipts = [future.result(0) for future in again]
        assert [type(r).__name__ for r in receipts] == ["Receipt", "Receipt"]
    assert len(told) == 1
    table = ledger.reader("r").table("segment_generated")
    assert table["index"].to_pylist() == [0, 1, 2]


def test_passing_trouble_and_lost_acknowledgements_store_each_append_once(ledger: Ledger) -> None:
    store = store_of(ledger)
    real = ledger.catalog.write_directly
    lost = [True, False, True]

    @contextlib.contextmanager
    def forgetful() -> Iterator[Driver]:
        with real() as driver:
            yield driver
        if lost and lost.pop():
            raise StorageFailed("the acknowledgement was lost")

    with ledger.queued_writer("r", producer="p") as queue:
        ledger.catalog.write_directly = forgetful  # type: ignore[method-assign]
        store.failures = 2
        futures = [queue.append([factory.score(n, 1.0)]) for n in range(3)]
        queue.flush()
        store.failures = 1
        futures.append(queue.append([factory.decide(0, "kept", rollout_step=0)]))
        futures.append(queue.append([factory.score(3, 1.0)]))
        queue.flush()
        assert [f.result(0).first_seq for f in futures] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
    assert not lost
    assert scores(ledger) == [0, 1, 2, 3]
    assert ledger.run("r").head_seq == 5


def test_a_failing_store_stops_the_queue_until_it_is_mended(ledger: Ledger) -> None:
    store = store_of(ledger)
    told: list[LedgerError] = []
    queue = ledger.queued_writer("r", producer="p", patience_s=0.1, on_trouble=told.append)
    with closing(queue):
        queue.append([factory.score(0, 1.0)])
        queue.flush()
        store.failures = -1
        futures = [queue.append([factory.score(n, 1.0)]) for n in (1, 2, 3)]
        for future in futures:
            with pytest.raises(StorageFailed, match="a faulty store"):
                future.result(20)
        with pytest.raises(StorageFailed, match=r"(?s)has stopped.*faulty store.*resume"):
            queue.append([factory.score(4, 1.0)])
        stats = queue.stats()
        assert (stats.state, stats.queued_appends) == ("stopped", 3)
        assert stats.last_error is not None
        store.failures = 0
        again = queue.resume()
        assert not wait(again, 20).not_done
        queue.append([factory.score(5, 1.0)])
        queue.close()
    assert len(told) == 1
    assert scores(ledger) == [0, 1, 2, 3, 5]


def test_a_full_queue_waits_then_says_how_full_it_is(ledger: Ledger) -> None:
    store = store_of(ledger)
    store.gate.clear()
    with ledger.queued_writer("r", producer="p", max_events=3, block_timeout_s=0.05) as queue:
        for n in range(3):
            queue.append([factory.score(n, 1.0)])
        with pytest.raises(StorageFailed, match=r"(?s)its queue is full.*3 events and"):
            queue.append([factory.score(3, 1.0)])
        store.gate.set()
        queue.flush()
        # An append that is larger than the queue goes alone.
        queue.append([factory.score(n, 1.0) for n in range(4, 9)])
        queue.flush()
    assert scores(ledger) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_what_was_not_stored_is_named_when_the_queue_is_closed(ledger: Ledger) -> None:
    store_of(ledger).failures = -1
    queue = ledger.queued_writer("r", producer="p")
    future = queue.append([factory.score(0, 1.0)])
    with pytest.raises(StorageFailed, match=r"1 appends with 1 events.*\n.*gone with this process"):
        queue.close(0.05)
    with pytest.raises(StorageFailed):
        future.result(0)
    queue.close()

    def broken_block() -> None:
        with ledger.queued_writer("r", producer="p", patience_s=0.0) as queue:
            queue.append([factory.score(0, 1.0)])
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block") as caught:
        broken_block()
    assert "1 appends with 1 events" in caught.value.__notes__[0]


def test_given_up_events_are_recorded_as_missing(ledger: Ledger) -> None:
    store = store_of(ledger)
    queue = ledger.queued_writer("r", producer="p", patience_s=0.0)
    with closing(queue):
        with pytest.raises(InvalidArgument, match="only what a stopped queue"):
            queue.abandon("for no reason")
        queue.append([factory.score(0, 1.0)])
        queue.flush()
        store.failures = -1
        queue.append([factory.score(1, 1.0), factory.decide(1, "kept", rollout_step=0)])
        until(lambda: queue.state is QueueState.STOPPED)
        refused = factory.score(2, 1.0)
        with pytest.raises(StorageFailed):
            queue.append([refused])
        queue.abandon("the disk is gone; password=hunter2 https://u:hunter2@h/", [refused])
        after = queue.append([factory.score(3, 1.0)])
        store.failures = 0
        queue.resume()
        queue.flush()
        assert queue.state is QueueState.RUNNING
        queue.close()
    assert wait([after], 0).done
    assert scores(ledger) == [0, 3]
    held, queued = gaps(ledger)
    assert (held["first_producer_seq"], held["kinds"]) == (None, ["sample_scored"])
    assert queued["producer"] == "p"
    assert (queued["first_producer_seq"], queued["last_producer_seq"]) == (1, 1)
    assert queued["kinds"] == ["sample_scored", "sample_decided"]
    assert queued["counts"] == [1, 1]
    assert queued["reason"].startswith("the disk is gone")
    assert "u:hunter2" not in queued["reason"]
    assert queued["began_at"] is not None


def test_a_gap_says_nothing_of_what_was_stored_after_all(ledger: Ledger) -> None:
    """The acknowledgement is lost for good, so nobody knows; then the caller gives up."""
    real = ledger.catalog.write_directly
    deaf = True

    @contextlib.contextmanager
    def forgetful() -> Iterator[Driver]:
        with real() as connection:
            yield connection
        if deaf:
            raise StorageFailed("the acknowledgement was lost")

    queue = ledger.queued_writer("r", producer="p", patience_s=0.0)
    with closing(queue):
        store_of(ledger).gate.clear()
        queue.append([factory.score(0, 1.0)])
        until(store_of(ledger).blocked.is_set)
        queue.append([factory.decide(0, "kept", rollout_step=0)])
        ledger.catalog.write_directly = forgetful  # type: ignore[method-assign]
        store_of(ledger).gate.set()
        until(lambda: queue.state is QueueState.STOPPED)
        deaf = False
        queue.abandon("nobody answers")
        queue.flush()
        queue.close()
    assert scores(ledger) == [0]
    (gap,) = gaps(ledger)
    assert (gap["first_producer_seq"], gap["kinds"]) == (None, ["sample_decided"])


def test_a_fenced_queue_stops_for_good(ledger: Ledger) -> None:
    queue = ledger.queued_writer("r", producer="p")
    with closing(queue):
        queue.append([factory.score(0, 1.0)])
        queue.flush()
        ledger.writer("r", producer="p")
        future = queue.append([factory.score(1, 1.0)])
        with pytest.raises(FencedOff):
            future.result(20)
        for call in (queue.resume, queue.flush, queue.close):
            with pytest.raises(FencedOff):
                call()
    assert scores(ledger) == [0]
    assert gaps(ledger) == []


def test_a_queue_that_nobody_closes_is_emptied_when_the_interpreter_ends(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from ledger import open_ledger
        from tests.ledger import factory
        from tests.ledger.faulty import FaultyStore, closing, gaps, scores, store_of, until

        def appended(folder, count, failures):
            ledger = open_ledger(folder, create=True)
            ledger.create_run("r")
            queue = ledger.queued_writer("r", producer="p", patience_s=0.0)
            ledger.store = FaultyStore(ledger.store)
            ledger.store.failures = failures
            for n in range(count):
                queue.append([factory.score(n, 1.0), factory.decide(n, "kept", rollout_step=0)])

        appended(sys.argv[1], 50, 0)
        appended(sys.argv[2], 1, -1)
        """
    )
    folders = [tmp_path / "sound", tmp_path / "broken"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.count("a queue was never closed") == 1, done.stderr
    assert "1 appends with 2 events" in done.stderr
    with open_ledger(folders[0]) as sound, open_ledger(folders[1]) as broken:
        assert scores(sound) == list(range(50))
        assert scores(broken) == []


def test_a_forked_process_may_not_use_its_parents_queue(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger.queued_writer("r", producer="p") as queue:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(InvalidArgument, match="forked"):
                queue.append([factory.score(0, 1.0)])
        queue.append([factory.score(0, 1.0)])
    assert scores(ledger) == [0]


def test_trouble_in_the_callback_is_said_with_the_error(ledger: Ledger) -> None:
    def broken(_: LedgerError) -> None:
        raise RuntimeError("of the callback")

    store_of(ledger).failures = -1
    queue = ledger.queued_writer("r", producer="p", patience_s=0.0, on_trouble=broken)
    with closing(queue):
        with pytest.raises(StorageFailed) as caught:
            queue.append([factory.score(0, 1.0)]).result(20)
        until(lambda: hasattr(caught.value, "__notes__"))
        assert "of the callback" in caught.value.__notes__[0]


def test_a_folder_that_is_moved_away_takes_nothing_until_it_is_back(
    ledger: Ledger, quick_path: Path
) -> None:
    ledger.store = store_of(ledger).inner
    folder, elsewhere = quick_path / "ledger", quick_path / "elsewhere"
    plain = ledger.writer("r", producer="plain")
    plain.append([factory.score(0, 1.0)])
    queue = ledger.queued_writer("r", producer="p", patience_s=0.1)
    with closing(queue):
        queue.append([factory.score(1, 1.0)])
        queue.flush()
        folder.rename(elsewhere)
        with pytest.raises(StorageFailed):
            plain.append([factory.score(2, 1.0)])
        with pytest.raises(StorageFailed):
            queue.append([factory.score(3, 1.0)]).result(20)
        assert not folder.exists()
        # A copy in its place is another ledger's file: what is open must not write to either.
        shutil.copytree(elsewhere, folder)
        with pytest.raises(StorageFailed, match="not the one that was opened"):
            plain.append([factory.score(2, 1.0)])
        shutil.rmtree(folder)
        elsewhere.rename(folder)
        plain.append([factory.score(2, 1.0)])
        queue.resume()
        queue.close()
    assert scores(ledger) == [0, 1, 2, 3]
    assert verify_ledger(ledger).ok


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "drop"}, "'stop', or 'spill'"),
        ({"policy": "spill"}, "with a folder"),
        ({"spill": "folder"}, "say policy='spill'"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_events": "many"}, "max_events"),
        ({"patience_s": float("nan")}, "patience_s"),
        ({"block_timeout_s": -1}, "block_timeout_s"),
        ({"policy": "spill", "spill": "folder", "max_spill_bytes": -1}, "max_spill_bytes"),
    ],
)
def test_options_that_cannot_be_meant_make_no_queue_and_no_epoch(
    ledger: Ledger, options: dict[str, Any], named: str
) -> None:
    earlier = ledger.writer("r", producer="p")
    with pytest.raises(InvalidArgument, match=named):
        ledger.queued_writer("r", producer="p", **options)
    earlier.append([factory.score(0, 1.0)])  # not fenced off
