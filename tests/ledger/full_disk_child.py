"""Appends to a ledger whose disk fills up, and looks at what is there; prints one JSON line.

python -m tests.ledger.full_disk_child FOLDER full | read-only | file-size

FOLDER is empty: `full` wants a small file system there, `read-only` a mount namespace of our own.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ledger import Ledger, open_ledger
from ledger.errors import StorageFailed
from ledger.events import Event, RoutingRecorded
from ledger.verify import verify_ledger
from ledger.writer import Writer
from tests.ledger import factory

BIG: list[Event] = [
    RoutingRecorded(
        index=1,
        segment=0,
        start=0,
        rows=4096,
        layers=10,
        topk=10,
        num_experts=200,
        dtype="uint8",
        expert_ids=bytes(range(10)) * 40_960,
    )
]
SMALL: list[Event] = [factory.score(1, 1.0), factory.decide(1, "kept", rollout_step=0)]


def files(folder: Path) -> list[str]:
    """All but the catalog's, and the links that are exported in the background."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("catalog.") and "links" not in path.parts
    )


def refused(ledger: Ledger, append: Callable[[], object]) -> str:
    """The error of an append that must fail and leave nothing visible."""
    head = ledger.run("r").head_seq
    try:
        append()
    except StorageFailed as error:
        if ledger.run("r").head_seq != head or not verify_ledger(ledger).ok:
            sys.exit("something of a failed append shows")
        return str(error)
    sys.exit("an append succeeded on a disk that is full")


def full(folder: Path) -> dict[str, object]:
    ballast = folder / "ballast"

    def fill(leave: int) -> None:
        """Fill the file system up to `leave` bytes."""
        ballast.unlink(missing_ok=True)
        free = os.statvfs(folder)
        with ballast.open("wb") as out:
            out.write(bytes(max(0, free.f_bavail * free.f_frsize - leave)))

    with open_ledger(folder / "ledger", create=True) as ledger:
        writer = begin(ledger)
        before = files(folder / "ledger")
        fill(100_000)
        big = refused(ledger, lambda: writer.append(BIG, producer_seq=5))
        litter = sorted(set(files(folder / "ledger")) - set(before))
        # Page by page: there comes a size at which the segment fits and SQLite's commit does not.
        commit, tries = "", 0
        for pages in range(2, 60):
            fill(pages * 4096)
            try:
                writer.append(SMALL, producer_seq=6)
            except StorageFailed as error:
                tries += 1
                if "catalog" in str(error).splitlines()[0]:
                    commit = str(error)
            else:
                break
        ballast.unlink()
        writer.append(BIG, producer_seq=5)
        writer.append(SMALL, producer_seq=6)
        return end(ledger) | {"big": big, "litter": litter, "commit": commit, "tries": tries}


def file_size(folder: Path) -> dict[str, object]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    with open_ledger(folder / "ledger", create=True) as ledger:
        writer = begin(ledger)
        before = files(folder / "ledger")
        with limited(200_000):
            big = refused(ledger, lambda: writer.append(BIG, producer_seq=5))
        litter = sorted(set(files(folder / "ledger")) - set(before))
        wal = folder / "ledger" / "catalog.sqlite-wal"
        with limited(wal.stat().st_size):
            commit = refused(ledger, lambda: writer.append(SMALL, producer_seq=6))
        writer.append(BIG, producer_seq=5)
        writer.append(SMALL, producer_seq=6)
        return end(ledger) | {"big": big, "litter": litter, "commit": commit, "tries": 1}


def read_only(folder: Path) -> dict[str, object]:
    with open_ledger(folder / "ledger", create=True) as ledger:
        writer = begin(ledger)
        runs = str(folder / "ledger" / "runs")
        ledger.exporter.flush()
        before = files(folder / "ledger")
        subprocess.run(["mount", "--bind", runs, runs], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)
        big = refused(ledger, lambda: writer.append(BIG, producer_seq=5))
        small = refused(ledger, lambda: writer.append(SMALL, producer_seq=6))
        subprocess.run(["umount", runs], check=True)
        litter = sorted(set(files(folder / "ledger")) - set(before))
        writer.append(BIG, producer_seq=5)
        writer.append(SMALL, producer_seq=6)
        return end(ledger) | {"big": big, "litter": litter, "commit": small, "tries": 1}


def begin(ledger: Ledger) -> Writer:
    ledger.create_run("r")
    writer = ledger.writer("r", producer="p")
    for n in range(4):  # SQLite's log becomes larger than a small segment
        writer.append([factory.score(100 + n, 1.0)])
    return writer


def end(ledger: Ledger) -> dict[str, object]:
    reader = ledger.reader("r")
    return {
        "sound": verify_ledger(ledger).ok,
        "head": ledger.run("r").head_seq,
        "routing": reader.table("routing_recorded").num_rows,
        "scores": reader.table("sample_scored")["index"].to_pylist(),
    }


if __name__ == "__main__":
    what = {"full": full, "read-only": read_only, "file-size": file_size}[sys.argv[2]]
    print(json.dumps(what(Path(sys.argv[1]))))
