"""Kills a compaction at every point where the world changes, and looks at what is left.

    python -m tests.ledger.compact_child FOLDER

As crash_child: for k = 0, 1, 2, … a forked child compacts a copy of a ledger and is killed at the
k-th point; another one opens what is left, compares what a reader sees, verifies, makes the catalog
again from the files, compacts, and compares again. Prints a JSON line a kill, and on standard
error what it was before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ledger import open_ledger
from ledger.compact import compact, plan_compaction
from ledger.place import place_of
from ledger.rebuild import read_store
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.crash_child import arm, in_child

KIND = "sample_scored"


def prepare(folder: Path) -> int:
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="p") as writer:
            writer.append([factory.weights(0, None, None)])
            for index in range(3):
                writer.append([factory.score(index, float(index))])
    return 0


def seal(folder: Path, at: int) -> int:
    with open_ledger(folder) as ledger:
        batches = plan_compaction(ledger, kinds=[KIND])
        with arm(at, folder, ledger):
            compact(ledger, batches)
    return 0


def inspect(folder: Path) -> int:
    with open_ledger(folder) as ledger:
        moved = sum(
            s.file is not None and s.file.format == "parquet" for s in ledger.segment_infos("r")
        )
        seen = scores(ledger)
        ok = verify_ledger(ledger).ok
        again = compact(ledger, plan_compaction(ledger, kinds=[KIND]))
        found: dict[str, Any] = {
            "moved": moved,
            "scores": seen,
            "ok": ok,
            "rebuilt": read_store(place_of(ledger.store, None).store).ok,
            "again": sum(f.segments for f in again.files),
            "scores_after": scores(ledger),
        }
    os.write(1, (json.dumps(found) + "\n").encode())
    return 0


def scores(ledger: Any) -> list[float]:
    return list(ledger.reader("r").table(KIND, ["reward"])["reward"].to_pylist())


def main(folder: Path) -> None:
    if in_child(lambda: prepare(folder / "base")) != 0:
        sys.exit("the ledger was not prepared")
    for at in range(1000):
        copy = folder / f"at-{at}"
        shutil.copytree(folder / "base", copy)
        status = in_child(lambda copy=copy, at=at: seal(copy, at))  # type: ignore[misc]
        if status == 0:
            return
        if not os.WIFSIGNALED(status) or in_child(lambda copy=copy: inspect(copy)) != 0:  # type: ignore[misc]
            sys.exit(f"point {at}: status {status}")
    sys.exit("no end was reached")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
