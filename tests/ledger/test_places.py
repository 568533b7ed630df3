"""The ledger does the same in every place: any store, any catalog."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ledger import Ledger
from ledger.errors import (
    AlreadyExists,
    Conflict,
    FencedOff,
    IdempotencyConflict,
    InvalidArgument,
    NotFound,
)
from ledger.events import BranchForked, StepCommitted
from ledger.mark import read_mark
from ledger.storage import open_store
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.places import AnyPlace


@pytest.fixture
def ledger(any_place: AnyPlace) -> Iterator[Ledger]:
    with any_place.open(create=True) as opened:
        opened.create_run(factory.RUN)
        yield opened


def test_a_whole_story(any_place: AnyPlace, ledger: Ledger) -> None:
    """Append, read, repeat, be fenced off, fork, consume twice, reopen, verify."""
    commits = factory.story()
    on_main = [c for c in commits if c.branch == "main"]
    old = ledger.writer(factory.RUN, producer="p")
    receipts = [old.append(c.events) for c in on_main]
    assert [r.first_seq for r in receipts[1:]] == [r.last_seq + 1 for r in receipts[:-1]]

    # the same again is the same receipt, also from another process; other content is refused
    with any_place.open() as other:
        assert other.ledger_id == ledger.ledger_id
        again = other.writer(factory.RUN, producer="p", epoch=old.epoch)
        assert again.append(on_main[-1].events, producer_seq=len(on_main) - 1) == receipts[-1]
        with pytest.raises(IdempotencyConflict):
            again.append(on_main[0].events, producer_seq=1)

    # a sample is trained once
    steps = [e for c in on_main for e in c.events if isinstance(e, StepCommitted)]
    with pytest.raises(Conflict, match="trained on before"):
        ledger.writer(factory.RUN, producer="q").append([steps[0]])
    with pytest.raises(Conflict, match="is there already"):
        ledger.writer(factory.RUN, producer="q").append(
            [e for e in on_main[-1].events if e.KIND == "weights_published"]
        )

    # a newer epoch fences the older one off
    ledger.writer(factory.RUN, producer="p")
    with pytest.raises(FencedOff):
        old.append(on_main[0].events)

    # a branch
    (fork,), later = (c.events for c in commits if c.branch != "main")
    assert isinstance(fork, BranchForked)
    with ledger.fork(factory.RUN, fork, producer="factory") as writer:
        writer.append(later)
    with pytest.raises(AlreadyExists):
        ledger.fork(factory.RUN, fork, producer="factory")
    with pytest.raises(AlreadyExists):
        ledger.create_run(factory.RUN)
    digest = ledger.content_digest(factory.RUN, fork.branch)

    with any_place.open(read_only=True) as again_open:
        assert again_open.run().head_seq == ledger.run().head_seq
        assert again_open.content_digest(factory.RUN, fork.branch) == digest
        expected = factory.story_tables()
        reader = again_open.reader(factory.RUN, None)
        assert {k: reader.table(k).num_rows for k in reader.kinds()} == {
            k: t.num_rows for k, t in expected.items()
        }
        report = verify_ledger(again_open, checkpoints=False)
        assert report.ok, report.lines()
        assert report.rows == sum(t.num_rows for t in expected.values())
        with pytest.raises(InvalidArgument, match="for reading only"):
            again_open.writer(factory.RUN, producer="p")
        with pytest.raises(InvalidArgument, match="for reading only"):
            again_open.create_run("other")


def test_many_threads_append_without_gaps(ledger: Ledger, any_place: AnyPlace) -> None:
    events = factory.story()[0].events
    writers, appends = 4, 2
    start = threading.Barrier(writers)

    def run(number: int) -> list[tuple[int, int]]:
        with any_place.open() as mine:
            writer = mine.writer(factory.RUN, producer=f"p{number}")
            start.wait(60)
            return [
                (r.first_seq, r.last_seq) for r in (writer.append(events) for _ in range(appends))
            ]

    with ThreadPoolExecutor(writers) as pool:
        places = sorted(p for found in pool.map(run, range(writers)) for p in found)
    assert places[0][0] == 1
    assert [a for a, _ in places[1:]] == [b + 1 for _, b in places[:-1]]
    assert ledger.run().head_seq == places[-1][1]
    assert verify_ledger(ledger).ok


def test_creating_at_once_makes_one_ledger(any_place: AnyPlace) -> None:
    start = threading.Barrier(4)

    def make(_: int) -> str:
        start.wait(60)
        with any_place.open(create=True) as made:
            with contextlib.suppress(AlreadyExists):
                made.create_run("r")
            return made.ledger_id

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, range(4)))) == 1
    with any_place.open() as made:
        assert [r.run_id for r in made.runs()] == ["r"]


def test_a_ledger_says_what_it_is(any_place: AnyPlace) -> None:
    with pytest.raises(NotFound, match=r"ledger init|create=True"):
        any_place.open()
    with any_place.open(create=True) as made:
        mark = read_mark(open_store(any_place.uri, any_place.storage_options))
        assert mark is not None
        assert mark.ledger_id == made.ledger_id
        assert mark.catalog == any_place.name.partition("+")[2].replace("postgres", "postgresql")
