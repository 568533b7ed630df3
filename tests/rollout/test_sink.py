"""Many coroutines append through one thread: what is shared, what is refused, and to whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from ledger.errors import FencedOff, InvalidArgument, InvalidEvent
from ledger.events import SampleDecided
from ledger.fields import Event
from rollout.sink import EventSink
from tests.bench.simulated import run_simulated


def decision(index: int) -> SampleDecided:
    return SampleDecided(
        index=index,
        rollout_id=index,
        group_index=0,
        rollout_step=0,
        decision="kept",
        reason="",
        rule="none",
    )


class Store:
    """Takes events; the first append waits until `go` is set, so that others queue up."""

    def __init__(self) -> None:
        self.appends: list[list[int]] = []
        self.go = threading.Event()
        self.bad: dict[int, Exception] = {}

    def append(self, events: Sequence[Event]) -> None:
        assert self.go.wait(10)
        found: list[Any] = list(events)
        for event in found:
            if event.index in self.bad:
                raise self.bad[event.index]
        self.appends.append([event.index for event in found])


async def _append_all(store: Store, calls: Sequence[Sequence[int]]) -> list[Any]:
    sink = EventSink(store.append)
    tasks = [asyncio.create_task(sink.append([decision(i) for i in one])) for one in calls]
    while store.go.is_set() is False:
        await asyncio.sleep(0)  # every task runs up to its append
        store.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await sink.close()
    with pytest.raises(InvalidArgument, match="the sink is closed"):
        await sink.append([decision(9)])
    return results


def test_what_waits_is_stored_together_in_order() -> None:
    store = Store()
    assert asyncio.run(_append_all(store, [[0], [1, 2], [3]])) == [None] * 3
    assert [i for one in store.appends for i in one] == [0, 1, 2, 3]
    assert len(store.appends) < 3
    assert [1, 2] in [one[at : at + 2] for one in store.appends for at in range(len(one))]


def test_a_refused_event_is_told_to_its_own_caller_alone() -> None:
    store = Store()
    store.bad[2] = InvalidEvent("no")
    results = asyncio.run(_append_all(store, [[0], [1, 2], [3]]))
    assert [type(one) for one in results] == [type(None), InvalidEvent, type(None)]
    assert sorted(i for one in store.appends for i in one) == [0, 3]


def test_a_fenced_writer_fails_everybody_from_then_on() -> None:
    store = Store()
    store.bad[1] = FencedOff("a newer epoch")
    store.go.set()

    async def scenario() -> None:
        sink = EventSink(store.append)
        await sink.append([decision(0)])
        with pytest.raises(FencedOff):
            await sink.append([decision(1)])
        with pytest.raises(FencedOff):
            await sink.append([decision(2)])

    asyncio.run(scenario())
    assert store.appends == [[0]]


def test_a_cancelled_caller_does_not_take_its_events_back() -> None:
    store = Store()

    async def scenario() -> None:
        sink = EventSink(store.append)
        task = asyncio.create_task(sink.append([decision(5)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        store.go.set()
        await sink.close()

    asyncio.run(scenario())
    assert store.appends == [[5]]


def test_appends_that_take_more_than_their_share_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes a second of computing, and one event comes every second: about ten go together."""
    store = Store()
    store.go.set()
    clock = iter(range(10**6))
    monkeypatch.setattr("rollout.sink.time.thread_time", clock.__next__)

    async def scenario() -> int:
        sink = EventSink(store.append)

        async def one(number: int) -> None:
            await asyncio.sleep(number)
            await sink.append([decision(number)])

        await asyncio.gather(*(one(number) for number in range(100)))
        appends = sink.appends
        await sink.close()
        return appends

    appends = run_simulated(scenario(), counts_work=False)
    assert sorted(i for one in store.appends for i in one) == list(range(100))
    assert 10 <= appends <= 14


def test_few_appends_do_not_wait() -> None:
    store = Store()
    store.go.set()

    async def scenario() -> float:
        sink = EventSink(store.append)
        for number in range(20):
            await sink.append([decision(number)])
        waited = asyncio.get_running_loop().time()
        await sink.close()
        return waited

    assert run_simulated(scenario(), counts_work=False) == 0
    assert len(store.appends) == 20
