"""Reading tokens and log-probs back, every byte of them, against a warm read of the same files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ledger import open_ledger
from ledger.reader import Reader
from tests.bench.child import in_new_process
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import RUN, emptied, generated, new_ledger, segment_files

__all__ = ["scan_figures", "touched"]

GROUP = "hot scan"
_COLUMNS = ("tokens", "rollout_log_probs")


def scan_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """A ledger that is newly opened each time; then one that stays open; then a new process."""
    parts = 2 if quick else 4
    root = emptied(folder / "ledger")
    with new_ledger(root) as (ledger, writer):
        for part in range(parts):
            writer.append(generated(16 << 20, seed=part))
        files = segment_files(ledger, "segment_generated")
    size = sum(file.stat().st_size for file in files)

    def first(verify: bool) -> None:
        with open_ledger(root) as ledger:
            scan_into_torch(ledger.reader(RUN, verify=verify))

    with open_ledger(root) as kept:
        scan_into_torch(kept.reader(RUN))
        times = interleaved(
            {
                "read": lambda: [file.read_bytes() for file in files],
                "first, hashes left out": lambda: first(False),
                "first, verified": lambda: first(True),
                "again, verified before": lambda: scan_into_torch(kept.reader(RUN)),
            },
            5 if quick else 15,
        )
    goals = {
        "first, hashes left out": 1.0,
        "first, verified": 0.5,
        "again, verified before": None,
    }
    for name, goal in goals.items():
        one, read = times[name], times["read"]
        opening = "" if goal is None else ", opening the ledger included"
        yield Figure(
            group=GROUP,
            name=f"into torch, {name}, {size / 1e6:.0f} MB",
            against="warm read() of the files",
            ratio=read.seconds / one.seconds,
            goal=goal,
            mb_per_s=size / 1e6 / one.seconds,
            mb_per_cpu_s=size / 1e6 / one.cpu_seconds,
            note=f"{one.seconds * 1e3:.0f} ms against {read.seconds * 1e3:.0f}{opening}; "
            "every byte of both columns touched",
            details={"ledger_s": one.seconds, "read_s": read.seconds, "size_bytes": size},
        )
    yield _new_process(root, size, 2 if quick else 3)


def _new_process(root: Path, size_bytes: int, repetitions: int) -> Figure:
    taken = [in_new_process("scan", root, RUN) for _ in range(repetitions)]
    one = {key: statistics.median(t[key] for t in taken) for key in taken[0]}
    return Figure(
        group=GROUP,
        name="into torch, a new process's first, verified",
        against="warm read() in that process",
        ratio=one["read_s"] / one["first_s"],
        mb_per_s=size_bytes / 1e6 / one["first_s"],
        note=f"{one['first_s'] * 1e3:.0f} ms (second scan {one['second_s'] * 1e3:.0f}, third "
        f"{one['third_s'] * 1e3:.0f}) against {one['read_s'] * 1e3:.0f}; imports of "
        f"{one['imports_s']:.1f} s apart",
        details=one,
    )


def scan_into_torch(reader: Reader) -> int:
    """Both per-token columns as tensors on the files' own memory, every byte looked at."""
    table = reader.table("segment_generated", _COLUMNS)
    return sum(touched(chunk) for name in _COLUMNS for chunk in table.column(name).chunks)


def touched(chunk: pa.Array) -> int:
    """The number of values of a list column, after a look at each of their bytes."""
    tensor = torch.from_dlpack(chunk.flatten())
    np.bitwise_or.reduce(tensor.view(torch.int32).numpy())
    return len(tensor)
