"""Kills an append at every point where the world changes, and looks at what is left.

    python -m tests.ledger.crash_child FOLDER {packed,alone}

`packed`: a small append, whose files get their names before they are synced. `alone`: one with
files of its own, written under other names first.

For k = 0, 1, 2, …: a copy of a ledger with one commit; a forked child appends a second commit and
is killed (SIGKILL) at the k-th point; another child opens what is left, verifies it, repeats the
append under the same key, and verifies again. Prints one JSON line a point, until an append ends
without having met its point.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ledger import open_ledger
from ledger.catalog.engine import Catalog
from ledger.verify import verify_ledger
from tests.ledger import factory

# With their time, so that a repetition has the same bytes, and so the same file names.
_SCORES = [factory.score(0, 1.0), factory.score(1, 0.0)]
_MORE = {"packed": factory.responses(0)[0], "alone": factory.weights(1, 0, 0)}
EVENTS = [event.evolve(recorded_at=1) for event in (*_SCORES, _MORE[sys.argv[2]])]


def arm(at: int) -> None:
    """Kill this process when the `at`-th point is reached."""
    lock = threading.Lock()
    passed = 0

    def point(what: str) -> None:
        nonlocal passed
        with lock:
            if passed == at:
                os.write(1, (what + "\n").encode())
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

    def around(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "write" and args[0] == 1:
                return real(*args)
            point(f"before {name}")
            if name == "write":
                # Half a file is the likeliest thing for a crash to leave.
                real(args[0], args[1][: len(args[1]) // 2])
                point("within write")
                return real(args[0], args[1][len(args[1]) // 2 :]) + len(args[1]) // 2
            result = real(*args, **kwargs)
            point(f"after {name}")
            return result

        setattr(os, name, wrapped)

    def around_transaction(name: str) -> None:
        real: Callable[..., Any] = getattr(Catalog, name)

        @contextlib.contextmanager
        def wrapped(self: Catalog) -> Iterator[Any]:
            point("before transaction")
            with real(self) as transaction:
                yield transaction
                point("before commit")
            point("after commit")

        setattr(Catalog, name, wrapped)

    for name in ("write", "fsync", "link", "rename", "unlink", "replace"):
        around(name)
    for name in ("write", "write_directly"):
        around_transaction(name)


def append(folder: Path, at: int) -> int:
    with open_ledger(folder) as ledger:
        writer = ledger.writer("r", producer="p", epoch=1)
        arm(at)
        writer.append(EVENTS, producer_seq=1)
    return 0


def inspect(folder: Path) -> int:
    with open_ledger(folder) as ledger:
        left = ledger.run("r").head_seq
        ok_before = verify_ledger(ledger).ok
        receipt = ledger.writer("r", producer="p", epoch=1).append(EVENTS, producer_seq=1)
        ok_after = verify_ledger(ledger).ok
        scores = ledger.reader("r").table("sample_scored")["index"].to_pylist()
        found = {
            "head": left,
            "ok_before": ok_before,
            "receipt": [receipt.first_seq, receipt.last_seq],
            "ok_after": ok_after,
            "scores": scores,
            "final": ledger.run("r").head_seq,
        }
        os.write(1, (json.dumps(found) + "\n").encode())
    return 0


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


def prepare(folder: Path) -> int:
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("r")
        ledger.writer("r", producer="p").append([factory.weights(0, None, None)])
    return 0


def main(folder: Path) -> None:
    """The parent touches no ledger itself, so that it stays free of threads and can fork."""
    if in_child(lambda: prepare(folder / "base")) != 0:
        sys.exit("the ledger was not prepared")
    for at in range(1000):
        copy = folder / f"at-{at}"
        shutil.copytree(folder / "base", copy)
        status = in_child(lambda copy=copy, at=at: append(copy, at))  # type: ignore[misc]
        if status == 0:
            return
        if not os.WIFSIGNALED(status) or in_child(lambda copy=copy: inspect(copy)) != 0:  # type: ignore[misc]
            sys.exit(f"point {at}: status {status}")
    sys.exit("no end was reached")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
