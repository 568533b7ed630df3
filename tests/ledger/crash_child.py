"""Kills appends at every point where the world changes, and looks at what is left.

    python -m tests.ledger.crash_child FOLDER CATALOG SCENARIO…

For k = 0, 1, 2, …: a forked child begins the appends of the scenario in a run of its own, each in a
thread of its own, and is killed (SIGKILL) before its k-th write, sync, naming, unlinking or
transaction step, which is after the one before. Then all that is left is looked at, all appends are
repeated under their keys, and all is looked at again. Prints one JSON line a kill, until a child
ends without having met its point.

`alone`: one append that shares nothing; `small`: one that may be packed with others; `together`:
three at once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ledger import Ledger, open_ledger
from ledger.catalog import sqlite
from ledger.events import Event
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.syscalls import recording, recording_catalog

Appends = Sequence[tuple[int, Sequence[Event]]]
"""Number and events of each."""


def keep_engines() -> None:
    """Let all ledgers of this process, and of its children, share one engine a catalog.

    SQLAlchemy compiles each statement anew for each engine, which would take most of the time.
    """
    engines: dict[str, sa.Engine] = {}
    create, configure = sa.create_engine, sqlite.configure
    configured: set[sa.Engine] = set()

    def kept(url: sa.URL, **options: Any) -> sa.Engine:
        address = url.render_as_string(hide_password=False)
        if address not in engines:
            engines[address] = create(url, **options)
        return engines[address]

    def once(engine: sa.Engine) -> None:
        if engine not in configured:
            configured.add(engine)
            configure(engine)

    sa.create_engine = kept
    sqlite.configure = once


def small(number: int) -> tuple[int, Sequence[Event]]:
    return number, [
        factory.score(10 * number, 1.0),
        factory.responses(0)[0].evolve(index=10 * number),
        factory.score(10 * number + 1, 0.0),
    ]


_AT_ONCE = 20
"""Runs that are begun in one go."""
_STRIDES = {"together": 2}
"""Where threads take turns, points lie close together: every second one is enough."""

SCENARIOS: dict[str, Appends] = {
    "small": [small(1)],
    "alone": [(1, [factory.score(10, 1.0), factory.weights(1, 0, None), factory.score(11, 1.0)])],
    "together": [small(1), small(2), small(3)],
}


def arm(at: int, root: Path, ledger: Ledger) -> contextlib.ExitStack:
    """Kill this process before the `at`-th step from now on."""
    lock = threading.Lock()
    passed = 0

    def point(what: str) -> None:
        nonlocal passed
        if what == "mkdir":
            return  # an empty folder is nothing
        if ledger.catalog.kind != "sqlite" and what not in ("commit", "committed"):
            return  # what happens to files is the same with every catalog
        with lock:
            if passed == at:
                # Not by os.write, which is one of the points.
                sys.stderr.write(what + "\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

    stack = contextlib.ExitStack()
    log = stack.enter_context(recording(root, before=point))
    stack.enter_context(recording_catalog(ledger, log, before=point))
    return stack


def append(place: tuple[Path, str], run: str, appends: Appends, at: int, report: int) -> int:
    """Append all at once, and report the number of each that was acknowledged."""
    folder, catalog = place
    with open_ledger(folder, catalog=catalog) as ledger:
        writer = ledger.writer(run, producer="p", epoch=1)
        ready = threading.Barrier(len(appends))
        failed: list[BaseException] = []

        def one(number: int, events: Sequence[Event]) -> None:
            ready.wait()
            try:
                writer.append(events, producer_seq=number)
            except BaseException as error:
                failed.append(error)
                raise
            os.write(report, bytes([number]))

        threads = [threading.Thread(target=one, args=each) for each in appends]
        with arm(at, folder, ledger):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return 1 if failed else 0


def look(place: tuple[Path, str], run: str, appends: Appends, *, verify: bool) -> dict[str, Any]:
    """What is there of each append, before and after all were repeated; `verify` checks all."""
    folder, catalog = place

    def there(ledger: Ledger) -> list[int]:
        indices = ledger.reader(run).table("sample_scored")["index"].to_pylist()
        return [sum(index // 10 == number for index in indices) for number, _ in appends]

    with open_ledger(folder, catalog=catalog) as ledger:
        found: dict[str, Any] = {
            "before": there(ledger),
            "sound": not verify or verify_ledger(ledger, run).ok,
        }
        writer = ledger.writer(run, producer="p", epoch=1)
        receipts = [writer.append(events, producer_seq=number) for number, events in appends]
        found["receipts"] = sorted((r.first_seq, r.last_seq) for r in receipts)
        found["after"] = there(ledger)
        found["head"] = ledger.run(run).head_seq
    return found


def in_child(function: Callable[[], int]) -> int:
    """The wait status of a forked child that ran `function`."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def ask_child(function: Callable[[int], int]) -> tuple[int, bytes, str]:
    """Wait status, report and error output of a forked child."""
    answer, report = os.pipe()
    errors, error = os.pipe()

    def reporting() -> int:
        os.dup2(error, 2)
        return function(report)

    status = in_child(reporting)
    os.close(report)
    os.close(error)
    with open(answer, "rb") as told, open(errors) as said:
        return status, told.read(), said.read()


def begin(place: tuple[Path, str], runs: Sequence[str]) -> None:
    with open_ledger(place[0], catalog=place[1], create=True) as ledger:
        for run in runs:
            ledger.create_run(run)
            ledger.writer(run, producer="p").append([factory.weights(0, None, None)])


def kill_all(place: tuple[Path, str], scenario: str) -> None:
    appends, warm = SCENARIOS[scenario], f"{scenario}-warm"
    begin(place, [warm, *(f"{scenario}-{number}" for number in range(_AT_ONCE))])
    # Once in this process, so that no child has to import anything. Its threads end with it.
    append(place, warm, appends, -1, os.open(os.devnull, os.O_WRONLY))
    look(place, warm, appends, verify=False)
    gc.freeze()
    met: set[str] = set()
    for number in range(1000):
        at, run = number * _STRIDES.get(scenario, 1), f"{scenario}-{number}"
        if number >= _AT_ONCE:
            begin(place, [run])
        status, told, said = ask_child(
            lambda report, at=at, run=run: append(place, run, appends, at, report)  # type: ignore[misc]
        )
        if status == 0:
            return
        if not os.WIFSIGNALED(status):
            sys.exit(f"point {at}: status {status}\n{said}")
        # To verify takes longer than all the rest: at the first point of each kind, and at the end.
        verify = said not in met
        met.add(said)
        line = {
            "scenario": scenario,
            "point": said.strip(),
            "told": [number in told for number, _ in appends],
        }
        print(json.dumps(line | look(place, run, appends, verify=verify)), flush=True)
    sys.exit("no end was reached")


def main(folder: Path, catalog: str, scenarios: Sequence[str]) -> None:
    keep_engines()
    for scenario in scenarios:
        kill_all((folder, catalog), scenario)
    with open_ledger(folder, catalog=catalog) as ledger:
        print(json.dumps({"all_sound": verify_ledger(ledger).ok}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
