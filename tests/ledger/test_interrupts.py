"""Interrupts, closing and forking while threads append: nobody hangs, nothing is stored twice."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument, StorageFailed
from ledger.verify import verify_ledger
from tests.ledger import factory

INTERRUPTS = 60


class Interrupt(BaseException):
    """As a KeyboardInterrupt, in any thread."""


class Appender(threading.Thread):
    """Appends its events one after the other, and repeats what was interrupted, as it is."""

    def __init__(self, append: Callable[[int], object], first: int) -> None:
        super().__init__(daemon=True)
        self.append, self.next = append, first
        self.appending = self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            try:
                self.one()
            except (Interrupt, StorageFailed):
                continue

    def one(self) -> None:
        while not self.stopping:
            self.appending = True
            self.append(self.next)
            self.next += 1
            self.appending = False

    def interrupt(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.ident or 0), ctypes.py_object(Interrupt)
        )


# What an interrupt strands (a file with a lock, say) is closed when it is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_point_hold_up_nobody_and_double_nothing(quick_path: Path) -> None:
    chosen = random.Random(5)
    with open_ledger(quick_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        shared = ledger.writer("run", producer="shared")
        threads = []
        for number in range(8):
            writer = shared if number % 2 else ledger.writer("run", producer=f"p{number}")

            def append(index: int, writer: object = writer) -> object:
                return writer.append([factory.score(index, 1.0)])  # type: ignore[attr-defined]

            threads.append(Appender(append, 10**6 * number))
        for thread in threads:
            thread.start()
        done, pause = 0, threading.Event()
        while done < INTERRUPTS:
            pause.wait(chosen.random() * 0.04)
            victim = threads[chosen.randrange(4)]
            if victim.appending:
                victim.interrupt()
                done += 1
        # All go on, those that were never interrupted too.
        for thread in threads:
            reached, deadline = thread.next, time.monotonic() + 30
            while thread.next < reached + 2:
                assert time.monotonic() < deadline, "a thread hangs"
                pause.wait(0.01)
        for thread in threads:
            thread.stopping = True
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        stored = ledger.reader("run").table("sample_scored")["index"].to_pylist()
        assert len(stored) == len(set(stored))
        for number, thread in enumerate(threads):
            assert set(range(10**6 * number, thread.next)) <= set(stored)
        assert verify_ledger(ledger).ok


def test_closing_waits_for_what_is_under_way_and_refuses_the_rest(quick_path: Path) -> None:
    ledger = open_ledger(quick_path / "ledger", create=True)
    ledger.create_run("run")
    outcomes: list[tuple[int, object]] = []

    def work(number: int) -> None:
        writer, index = ledger.writer("run", producer=f"p{number}"), 1000 * number
        started.release()
        while True:
            try:
                outcomes.append((index, writer.append([factory.score(index, 1.0)])))
                index += 1
            except Exception as error:
                outcomes.append((index, error))
                return

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    while len(outcomes) < 20:
        threading.Event().wait(0.001)
    ledger.close()
    for thread in threads:
        thread.join(30)
    errors = [outcome for _, outcome in outcomes if isinstance(outcome, Exception)]
    assert [type(error) for error in errors] == [InvalidArgument] * 6, errors
    with open_ledger(quick_path / "ledger") as again:
        stored = again.reader("run").table("sample_scored")["index"].to_pylist()
        assert sorted(stored) == sorted(i for i, o in outcomes if not isinstance(o, Exception))
        assert verify_ledger(again).ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_to_open_its_own(quick_path: Path) -> None:
    with open_ledger(quick_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        writer = ledger.writer("run", producer="p")
        writer.append([factory.score(0, 1.0)])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.append([factory.score(1, 1.0)])
            except InvalidArgument as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
            threading.Event().wait(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        writer.append([factory.score(2, 1.0)])
        assert ledger.run().head_seq == 2
