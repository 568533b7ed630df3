"""The commit protocol as a state machine: whatever happens in whatever order, each append is there
once, in the order in which it was acknowledged, and the chain holds."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from ledger import Ledger, open_ledger
from ledger.catalog.records import Receipt
from ledger.catalog.tables import commits
from ledger.errors import Conflict, FencedOff, IdempotencyConflict, StorageFailed
from ledger.fields import Event
from ledger.verify import verify_ledger
from ledger.writer import Writer
from tests.ledger import factory

_LEDGER: list[Ledger] = []
_runs = itertools.count()


@pytest.fixture(autouse=True)
def _one_ledger() -> Iterator[None]:
    """To make one takes longer than an example."""
    with open_ledger("memory://commit-protocol", create=True) as opened:
        _LEDGER.append(opened)
        yield
        _LEDGER.clear()


class Appends(RuleBasedStateMachine):
    """The model is the list of commits that must be there, in order."""

    writers = Bundle("writers")
    done = Bundle("done")

    @initialize()
    def begin(self) -> None:
        self.ledger = _LEDGER[0]
        self.run = f"run-{next(_runs)}"
        self.ledger.create_run(self.run)
        self.commits: list[tuple[Receipt, Sequence[Event]]] = []
        self.epochs: dict[str, int] = {}
        self.numbers = itertools.count(1)
        self.trained: set[int] = set()
        self.expect([factory.weights(0, None, None)], self.writer("p0"))

    def writer(self, producer: str) -> Writer:
        self.epochs[producer] = self.epochs.get(producer, 0) + 1
        writer = self.ledger.writer(self.run, producer=producer)
        assert writer.epoch == self.epochs[producer]
        return writer

    def is_newest(self, writer: Writer) -> bool:
        return self.epochs[writer.producer] == writer.epoch

    def events(self, rows: int) -> list[Event]:
        number = next(self.numbers)
        made: list[Event] = [factory.score(1000 * number + row, 1.0) for row in range(rows)]
        return [*made, factory.decide(1000 * number, "kept", rollout_step=number)]

    def expect(self, events: Sequence[Event], writer: Writer, number: int | None = None) -> Receipt:
        receipt = writer.append(events, producer_seq=number)
        head = self.commits[-1][0].last_seq if self.commits else 0
        assert (receipt.first_seq, receipt.last_seq) == (head + 1, head + len(events))
        self.commits.append((receipt, events))
        return receipt

    @rule(target=writers, producer=st.sampled_from(["p1", "p2"]))
    def begin_epoch(self, producer: str) -> Writer:
        return self.writer(producer)

    @rule(target=done, writer=writers, rows=st.integers(1, 2), number=st.integers(20, 40))
    def append_by_number(self, writer: Writer, rows: int, number: int) -> Any:
        events = self.events(rows)
        if not self.is_newest(writer):
            with pytest.raises(FencedOff):
                writer.append(events, producer_seq=number)
            return multiple()
        try:
            receipt = self.expect(events, writer, number)
        except IdempotencyConflict:
            # Drawn twice, or counted up to by appends without a number: it must be in use.
            assert self.is_in_use(writer, number)
            return multiple()
        return writer, number, events, receipt

    def is_in_use(self, writer: Writer, number: int) -> bool:
        key = {"run_id": self.run, "producer": writer.producer, "epoch": writer.epoch}
        query = sa.select(commits).filter_by(**key, producer_seq=number)
        with self.ledger.catalog.read() as connection:
            return connection.execute(query).first() is not None

    @rule(one=done)
    def repeat(self, one: tuple[Writer, int, Sequence[Event], Receipt]) -> None:
        writer, number, events, receipt = one
        again = self.ledger.writer(self.run, producer=writer.producer, epoch=writer.epoch)
        if self.is_newest(writer):
            assert again.append(events, producer_seq=number) == receipt
        else:
            with pytest.raises(FencedOff):
                again.append(events, producer_seq=number)

    @rule(one=done)
    def take_the_key_for_something_else(
        self, one: tuple[Writer, int, Sequence[Event], Receipt]
    ) -> None:
        writer, number, _, _ = one
        with pytest.raises(IdempotencyConflict if self.is_newest(writer) else FencedOff):
            writer.append(self.events(1), producer_seq=number)

    @rule(writer=writers, alone=st.booleans())
    def lose_the_acknowledgement(self, writer: Writer, alone: bool) -> None:
        if not self.is_newest(writer):
            return
        events = self.events(1)
        if alone:  # not packed with others
            events.append(
                factory.step(next(self.numbers), [], rollout_step=0, version_in=0, version_out=0)
            )
        names = ("write", "write_directly")
        real = {name: getattr(self.ledger.catalog, name) for name in names}

        def deaf(name: str) -> Any:
            @contextlib.contextmanager
            def transaction() -> Iterator[Any]:
                with real[name]() as opened:
                    yield opened
                raise StorageFailed("the acknowledgement was lost")

            return transaction

        for name in names:
            setattr(self.ledger.catalog, name, deaf(name))
        try:
            with pytest.raises(StorageFailed):
                writer.append(events)
        finally:
            for name in names:
                setattr(self.ledger.catalog, name, real[name])
        self.expect(events, writer)

    @rule(writer=writers)
    def fail_to_store(self, writer: Writer) -> None:
        if not self.is_newest(writer):
            return
        events = self.events(1)
        store, real = self.ledger.store, self.ledger.store.put_hashed

        def full(objects: Any) -> None:
            raise StorageFailed("the disk is full")

        store.put_hashed = full  # type: ignore[method-assign]
        try:
            with pytest.raises(StorageFailed):
                writer.append(events)
        finally:
            store.put_hashed = real  # type: ignore[method-assign]
        self.expect(events, writer)

    @rule(index=st.integers(0, 3))
    def train(self, index: int) -> None:
        step = next(self.numbers)
        events = [factory.step(step, [index], rollout_step=0, version_in=0, version_out=0)]
        writer = self.ledger.writer(self.run, producer="p0", epoch=1)
        if index in self.trained:
            with pytest.raises(Conflict, match=f"sample {index}"):
                writer.append(events, producer_seq=100 + step)
        else:
            self.trained.add(index)
            self.expect(events, writer, 100 + step)

    @rule(writer=writers, count=st.integers(2, 4))
    def append_by_threads(self, writer: Writer, count: int) -> None:
        if not self.is_newest(writer):
            return
        appends = [self.events(1) for _ in range(count)]
        receipts: list[Receipt | None] = [None] * count

        def run(number: int) -> None:
            receipts[number] = writer.append(appends[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = sorted(
            zip(receipts, appends, strict=True), key=lambda one: one[0].first_seq if one[0] else 0
        )
        for receipt, events in made:
            assert receipt is not None
            head = self.commits[-1][0].last_seq
            assert (receipt.first_seq, receipt.last_seq) == (head + 1, head + len(events))
            self.commits.append((receipt, events))

    @invariant()
    def the_head_is_the_last_receipt(self) -> None:
        if getattr(self, "commits", None):
            run, last = self.ledger.run(self.run), self.commits[-1][0]
            assert (run.head_seq, run.head_chain) == (last.last_seq, last.chain)

    def teardown(self) -> None:
        if not getattr(self, "commits", None):
            return
        report = verify_ledger(self.ledger, self.run)
        assert report.ok, report.lines()
        assert report.commits == len(self.commits)
        table = self.ledger.reader(self.run).table("sample_scored", columns=["index"])
        scored = [
            event.index
            for _, events in self.commits
            for event in events
            if isinstance(event, factory.SampleScored)
        ]
        assert table["index"].to_pylist() == scored


Appends.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestCommitProtocol = Appends.TestCase
