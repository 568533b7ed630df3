"""Processes that append to one run at once, and are killed now and then.

    python -m tests.ledger.many_writers_child PLACE CATALOG WORKERS APPENDS KILL_EVERY

CATALOG is '-' for the place's own. This process opens nothing and has no threads, so that it can
fork: WORKERS children make APPENDS appends each, under their own producer names in epoch 1, number
n with the events of `group(worker, n)`. After every KILL_EVERY acknowledged appends (0: never) some
child is killed, wherever it is, and another takes its place: it repeats the first append that was
not acknowledged, with its number. Prints how many were killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence

from ledger import open_ledger
from ledger.fields import Event
from tests.ledger import factory

ROWS = 3
"""Events in an append."""


def group(worker: int, number: int) -> Sequence[Event]:
    """The events of an append: two scores and a decision."""
    index = 2 * (1_000_000 * worker + number)
    return [
        factory.score(index, 1.0),
        factory.score(index + 1, 0.0),
        factory.decide(index, "kept", rollout_step=number),
    ]


def work(place: str, catalog: str | None, worker: int, start: int, appends: int, out: int) -> int:
    """Make the appends from `start` on; a byte, the worker's number, into `out` for each."""
    with open_ledger(place, catalog=catalog) as ledger:
        writer = ledger.writer("r", producer=f"p{worker}", epoch=1)
        for number in range(start, appends):
            # Every other one without a number of its own: then it counts from 0.
            numbered = start > 0 or number % 2 == 0
            writer.append(group(worker, number), producer_seq=number if numbered else None)
            os.write(out, bytes([worker]))
    return 0


def main(place: str, catalog: str | None, workers: int, appends: int, kill_every: int) -> int:
    """Run all; the number of children that were killed."""
    told, out = os.pipe()
    random_worker = random.Random(0)
    acknowledged = [0] * workers
    children: dict[int, int] = {}

    def start(worker: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.close(told)
                code = work(place, catalog, worker, acknowledged[worker], appends, out)
            finally:
                os._exit(code)
        children[worker] = pid

    for worker in range(workers):
        start(worker)
    killed = 0
    while sum(acknowledged) < workers * appends:
        for worker in os.read(told, 1):
            acknowledged[worker] += 1
        if kill_every and sum(acknowledged) % kill_every == 0:
            left = [w for w in range(workers) if acknowledged[w] < appends]
            if not left:
                break
            victim = random_worker.choice(left)
            os.kill(children[victim], signal.SIGKILL)
            os.waitpid(children[victim], 0)
            # What it acknowledged before it died is still in the pipe, behind what others say.
            killed += 1
            _drain(told, acknowledged)
            start(victim)
    failed = [w for w, pid in children.items() if os.waitpid(pid, 0)[1] != 0]
    if failed:
        sys.exit(f"workers {failed} failed")
    return killed


def _drain(told: int, acknowledged: list[int]) -> None:
    os.set_blocking(told, False)
    try:
        for worker in os.read(told, 1 << 16):
            acknowledged[worker] += 1
    except BlockingIOError:
        pass
    finally:
        os.set_blocking(told, True)


if __name__ == "__main__":
    print(main(sys.argv[1], None if sys.argv[2] == "-" else sys.argv[2], *map(int, sys.argv[3:6])))
