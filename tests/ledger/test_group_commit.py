"""Group commit: appends that wait share files and a transaction, and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import Ledger, open_ledger
from ledger.catalog.records import Receipt
from ledger.errors import Conflict, FencedOff, IdempotencyConflict, InvalidEvent, StorageFailed
from ledger.segment import Identity, read_identities
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.faulty import until


@pytest.fixture
def ledger(quick_path: Path) -> Iterator[Ledger]:
    with open_ledger(quick_path / "ledger", create=True) as opened:
        opened.create_run("r")
        yield opened


class Crowd:
    """Appends by a thread each, of which all but the first wait until the store lets go.

    `failures` of the store's next answers are errors: StorageFailed, or what is given.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.outcomes: dict[str, Receipt | BaseException] = {}
        self.failures: list[BaseException] = []
        self._ledger = ledger
        self._threads: list[threading.Thread] = []
        self._gate, blocked = threading.Event(), threading.Event()
        self._real = ledger.store.put_hashed

        def put_hashed(objects: Sequence[tuple[str, Any]]) -> None:
            blocked.set()
            assert self._gate.wait(60)
            if self.failures:
                raise self.failures.pop()
            self._real(objects)

        ledger.store.put_hashed = put_hashed  # type: ignore[method-assign]
        writer = ledger.writer("r", producer="first")
        self.add("first", lambda: writer.append([factory.score(900, 1.0)]))
        assert blocked.wait(60)

    def add(self, name: str, append: Callable[[], Receipt]) -> None:
        def run() -> None:
            try:
                self.outcomes[name] = append()
            except BaseException as error:
                self.outcomes[name] = error

        waiting = self._ledger.commit_queue("r").waiting
        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()
        if len(self._threads) > 1:
            until(lambda: self._ledger.commit_queue("r").waiting > waiting or not thread.is_alive())

    def go(self) -> dict[str, Receipt | BaseException]:
        """Let the store go on, and wait for all."""
        self._gate.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._ledger.store.put_hashed = self._real  # type: ignore[method-assign]
        return self.outcomes


def seqs(outcome: Receipt | BaseException) -> tuple[int, int]:
    assert isinstance(outcome, Receipt), outcome
    return outcome.first_seq, outcome.last_seq


def hot_files(ledger: Ledger, kind: str) -> list[str]:
    return list(ledger.store.list(f"runs/r/hot/{kind}"))


def test_what_waits_is_stored_together_and_stays_apart(ledger: Ledger) -> None:
    versions = ledger.writer("r", producer="versions")
    versions.append([factory.weights(0, None, None)])
    writers = [ledger.writer("r", producer=f"p{n}") for n in range(6)]
    crowd = Crowd(ledger)
    for n, writer in enumerate(writers[:5]):
        # The kinds in another order each: within an append they keep theirs.
        events = [factory.score(n, 1.0), factory.decide(n, "kept", rollout_step=n)]
        crowd.add(f"{n}", lambda w=writer, e=events[:: 1 - 2 * (n % 2)]: w.append(e))  # type: ignore[misc]
    one = factory.segment(7, factory.ints(5, 6), rollout_step=0)
    crowd.add("alone", lambda: versions.append([factory.weights(1, 0, None)]))
    crowd.add("large", lambda: writers[5].append([one, factory.score(7, 0.0)]))
    outcomes = crowd.go()
    assert seqs(outcomes["first"]) == (2, 2)
    assert [seqs(outcomes[f"{n}"]) for n in range(5)] == [(3 + 2 * n, 4 + 2 * n) for n in range(5)]
    assert seqs(outcomes["alone"]) == (13, 13)
    assert seqs(outcomes["large"]) == (14, 15)
    assert len(hot_files(ledger, "sample_scored")) == 2
    assert len(hot_files(ledger, "sample_decided")) == 1
    assert verify_ledger(ledger).ok
    found = ledger.reader("r").table("sample_scored", columns=["seq", "index"])
    assert found.to_pydict() == {"seq": [2, 3, 6, 7, 10, 11, 15], "index": [900, 0, 1, 2, 3, 4, 7]}
    infos = [s for s in ledger.segment_infos("r") if s.kind == "sample_scored"][1:]
    assert [(s.file.row_offset, s.file.rows) for s in infos if s.file] == [(n, 1) for n in range(6)]
    table = ledger.index.open(infos[3])
    assert table["index"].to_pylist() == [3]
    part = [0, 1, 0, 1, 0]
    assert read_identities(table) == [
        *((Identity("r", "main", f"p{n}", 1, 0, part[n]), n, 1) for n in range(5)),
        (Identity("r", "main", "p5", 1, 0, 1), 5, 1),
    ]


def test_an_append_that_is_refused_fails_alone(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    old = ledger.writer("r", producer="q")
    ledger.writer("r", producer="q")
    good = [factory.segment(1, factory.ints(5, 6), rollout_step=0)]
    bad = [factory.segment(2, factory.ints(5, -6), rollout_step=0)]
    unknown = [
        factory.segment(3, factory.ints(5), rollout_step=0).evolve(
            span_versions=np.array([9], np.int64)
        )
    ]
    crowd = Crowd(ledger)
    crowd.add("good", lambda: writer.append(good, producer_seq=5))
    crowd.add("token below zero", lambda: writer.append(bad, producer_seq=6))
    crowd.add("unknown version", lambda: writer.append(unknown, producer_seq=7))
    crowd.add("same key, same content", lambda: writer.append(good, producer_seq=5))
    crowd.add(
        "same key, other content", lambda: writer.append([factory.score(9, 1.0)], producer_seq=5)
    )
    crowd.add("old epoch", lambda: old.append([factory.score(4, 1.0)]))
    crowd.add(
        "version again", lambda: writer.append([factory.weights(0, None, None)], producer_seq=8)
    )
    crowd.add("also good", lambda: writer.append([factory.score(5, 1.0)], producer_seq=9))
    once, twice = (
        [
            factory.step(step, [1], rollout_step=0, version_in=0, version_out=step + 1),
            factory.weights(step + 1, 0, step),
        ]
        for step in (0, 1)
    )
    crowd.add("sample once", lambda: writer.append(once, producer_seq=10))
    crowd.add("sample twice", lambda: writer.append(twice, producer_seq=11))
    outcomes = crowd.go()
    assert seqs(outcomes["good"]) == seqs(outcomes["same key, same content"]) == (3, 3)
    assert seqs(outcomes["also good"]) == (4, 4)
    assert seqs(outcomes["sample once"]) == (5, 6)
    for name, error, text in (
        ("token below zero", InvalidEvent, "-6"),
        ("unknown version", InvalidEvent, "9"),
        ("same key, other content", IdempotencyConflict, "taken by other content"),
        ("old epoch", FencedOff, "epoch 2"),
        ("version again", Conflict, "there already"),
        ("sample twice", Conflict, "sample 1"),
    ):
        outcome = outcomes[name]
        assert type(outcome) is error, name
        assert text in str(outcome), name
    assert ledger.run("r").head_seq == 6
    assert verify_ledger(ledger).ok
    # The numbers of those that were refused are free.
    assert writer.append(bad_made_good(bad), producer_seq=6).first_seq == 7


def bad_made_good(events: Sequence[Any]) -> list[Any]:
    return [event.evolve(tokens=abs(event.tokens)) for event in events]


def test_a_store_that_fails_fails_all_of_them_and_none_shows(ledger: Ledger) -> None:
    crowd = Crowd(ledger)
    writers = [ledger.writer("r", producer=f"p{n}") for n in range(5)]
    for n, writer in enumerate(writers):
        crowd.add(f"{n}", lambda w=writer, n=n: w.append([factory.score(n, 1.0)]))  # type: ignore[misc]
    crowd.failures = [StorageFailed("the disk is full"), StorageFailed("the disk is full")]
    outcomes = crowd.go()
    assert len(outcomes) == 6
    assert all(type(outcome) is StorageFailed for outcome in outcomes.values())
    assert len({id(outcome) for outcome in outcomes.values()}) == 6
    assert ledger.run("r").head_seq == 0
    assert [w.append([factory.score(n, 1.0)]).first_seq for n, w in enumerate(writers)] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert verify_ledger(ledger).ok


def test_lost_acknowledgements_are_made_good_by_repeating(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without numbers, and by threads that share a writer: nothing is there twice."""

    def deaf(real: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
        @contextlib.contextmanager
        def transaction() -> Iterator[Any]:
            with real() as opened:
                yield opened
            raise StorageFailed("the acknowledgement was lost")

        return transaction

    writer = ledger.writer("r", producer="p")
    appends: list[list[Any]] = [[factory.score(n, 1.0)] for n in range(4)]
    appends.append([factory.step(0, [], rollout_step=0, version_in=0, version_out=0)])
    writer.append([factory.weights(0, None, None)])
    crowd = Crowd(ledger)
    for n, events in enumerate(appends):
        crowd.add(f"{n}", lambda e=events: writer.append(e))  # type: ignore[misc]
    with monkeypatch.context() as patch:
        for name in ("write", "write_directly"):
            patch.setattr(ledger.catalog, name, deaf(getattr(ledger.catalog, name)))
        outcomes = crowd.go()
    assert all(type(outcome) is StorageFailed for outcome in outcomes.values())
    assert ledger.run("r").head_seq == 7
    # In another order, and with something new in between.
    assert writer.append(appends[3]).first_seq == 6
    assert writer.append([factory.score(50, 1.0)]).first_seq == 8
    assert [writer.append(events).first_seq for events in (*appends[:3], appends[4])] == [
        3,
        4,
        5,
        7,
    ]
    assert ledger.reader("r").table("sample_scored")["index"].to_pylist() == [900, 0, 1, 2, 3, 50]
    assert ledger.run("r").head_seq == 8
    assert verify_ledger(ledger).ok


def test_an_interrupted_leader_leaves_a_queue_that_works(ledger: Ledger) -> None:
    crowd = Crowd(ledger)
    crowd.failures = [KeyboardInterrupt()]
    writers = [ledger.writer("r", producer=f"p{n}") for n in range(3)]
    for n, writer in enumerate(writers):
        crowd.add(f"{n}", lambda w=writer, n=n: w.append([factory.score(n, 1.0)]))  # type: ignore[misc]
    outcomes = crowd.go()
    assert type(outcomes["first"]) is KeyboardInterrupt
    assert sorted(seqs(outcomes[f"{n}"]) for n in range(3)) == [(1, 1), (2, 2), (3, 3)]
    assert verify_ledger(ledger).ok


def test_a_lone_append_waits_for_nobody(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did, it would for an hour."""
    from ledger import commit_queue

    monkeypatch.setattr(commit_queue, "_GATHER_S", 3600.0)
    writer = ledger.writer("r", producer="p")
    for n in range(3):
        assert writer.append([factory.score(n, 1.0)]).first_seq == n + 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_thread_that_is_interrupted_while_it_waits_holds_up_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Also where it is the one that would lead next."""
    crowd = Crowd(ledger)
    writers = [ledger.writer("r", producer=f"p{n}") for n in range(3)]
    victim = f"p{place}"

    class Interrupted:
        """A lock that interrupts the thread that waits for it, once."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.acquired = inner, 0

        def acquire(self, timeout: float = -1) -> bool:
            self.acquired += 1
            if self.acquired == 2:
                gone.wait(60)
                raise KeyboardInterrupt
            return bool(self.inner.acquire(timeout=timeout))

        def release(self) -> None:
            self.inner.release()

        def locked(self) -> bool:
            return bool(self.inner.locked())

    gone = threading.Event()
    queue = ledger.commit_queue("r")
    real = queue.submit

    def submit(one: Any) -> Receipt:
        if one.writer.producer == victim:
            one.done = Interrupted(one.done)
        return real(one)

    monkeypatch.setattr(queue, "submit", submit)
    for n, writer in enumerate(writers):
        crowd.add(f"p{n}", lambda w=writer, n=n: w.append([factory.score(n, 1.0)]))  # type: ignore[misc]
    gone.set()
    until(lambda: victim in crowd.outcomes)
    outcomes = crowd.go()
    assert type(outcomes[victim]) is KeyboardInterrupt
    kept = [n for n in range(3) if n != place]
    assert [seqs(outcomes[f"p{n}"]) for n in kept] == [(2, 2), (3, 3)]
    assert writers[place].append([factory.score(place, 1.0)]).first_seq == 4
    assert verify_ledger(ledger).ok
