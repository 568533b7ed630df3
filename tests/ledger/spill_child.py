"""Kills a process that spills and catches up, at every step and at random moments, and looks.

    python -m tests.ledger.spill_child FOLDER STEPS_TO_TRY SECONDS

A forked child appends to a queue whose store fails for a while, printing the number of each append
that was acknowledged, and is killed (SIGKILL): at the k-th call of write, fsync, rename, unlink or
commit, or after a random time. Another child then opens a queue as the program would after a
restart, and prints which numbers the ledger has. Prints one JSON line a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from ledger import open_ledger, queue_core
from ledger.queue_items import SpilledReceipt
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.crash_child import arm, in_child, keep_engines
from tests.ledger.faulty import FaultyStore

APPENDS = 8


def write_on(folder: Path, report: int, at: int | None) -> int:
    """Append 0 to 7; the store fails from the third on and is back before the seventh."""
    with open_ledger(folder / "ledger") as ledger:
        store = FaultyStore(ledger.store)
        ledger.store = store  # type: ignore[assignment]
        armed = contextlib.nullcontext() if at is None else arm(at, folder, ledger)
        with (
            armed,
            ledger.queued_writer(
                "r", producer="p", policy="spill", spill=folder / "spill", patience_s=0.0
            ) as queue,
        ):
            for n in range(APPENDS):
                if n in (2, 6):
                    store.failures = -1 if n == 2 else 0
                queue.append([factory.score(n, 1.0)]).result(60)
                os.write(report, bytes([n]))
    return 0


def look(folder: Path, report: int, *, verify: bool) -> int:
    with open_ledger(folder / "ledger") as ledger:
        with ledger.queued_writer(
            "r", producer="p", policy="spill", spill=folder / "spill"
        ) as queue:
            after = queue.append([factory.score(99, 1.0)]).result(60)
        left = [p.name for p in (folder / "spill").rglob("*") if p.is_file() and p.name != "lock"]
        found = {
            "there": ledger.reader("r").table("sample_scored")["index"].to_pylist(),
            "sound": not verify or verify_ledger(ledger).ok,
            "gaps": "gap_recorded" in ledger.reader("r").kinds(),
            "left": left,
            "after": not isinstance(after, SpilledReceipt),
        }
        os.write(report, json.dumps(found).encode())
    return 0


def kill_one(folder: Path, at: int | None, seconds: float | None, *, verify: bool) -> bool:
    """Whether the child met its end before it was done."""
    folder.mkdir()
    shutil.copytree(folder.parent / "base" / "ledger", folder / "ledger")
    acknowledged, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = write_on(folder, report, at)
        finally:
            os._exit(code)
    os.close(report)
    if seconds is not None:
        time.sleep(seconds)  # this is the moment of the kill, not a wait for something
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    told = list(os.read(acknowledged, 1000))
    os.close(acknowledged)
    if status == 0:
        return False
    if not os.WIFSIGNALED(status):
        sys.exit(f"kill {at} {seconds}: status {status}")
    answer, report = os.pipe()
    if in_child(lambda: look(folder, report, verify=verify)) != 0:
        sys.exit(f"kill {at} {seconds}: what is left cannot be used")
    os.close(report)
    found = json.loads(os.read(answer, 100_000))
    os.close(answer)
    print(json.dumps(found | {"told": told, "at": at, "seconds": seconds}), flush=True)
    shutil.rmtree(folder)
    return True


def prepare(folder: Path) -> None:
    with open_ledger(folder / "ledger", create=True) as ledger:
        ledger.create_run("r")


def main(folder: Path, steps: int, seconds: float) -> None:
    keep_engines()
    queue_core._PAUSES_S = (0.002, 0.01)
    # Once in this process, so that no child has to import anything. Its threads end with it.
    for name in ("warm", "base"):
        (folder / name).mkdir(parents=True)
        prepare(folder / name)
    report = os.open(os.devnull, os.O_WRONLY)
    write_on(folder / "warm", report, None)
    look(folder / "warm", report, verify=True)
    until = time.monotonic() + seconds
    chosen = random.Random(0)
    number = kills = 0
    while time.monotonic() < until or kills < 4:
        number += 1
        verify = kills % 8 == 0  # it takes longer than all the rest
        at = chosen.randrange(steps) if number % 3 else None
        moment = None if at is not None else chosen.uniform(0.02, 0.25)
        kills += kill_one(folder / f"k{number}", at, moment, verify=verify)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
