"""Reading tokens and log-probs back, every byte of them, against a warm read of the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ledger import open_ledger
from ledger.reader import Reader
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import RUN, emptied, generated, new_ledger, segment_files

__all__ = ["scan_figures", "touched"]

GROUP = "hot scan"
_COLUMNS = ("tokens", "rollout_log_probs")


def scan_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """A ledger that is newly opened each time, read into torch with and without hashes."""
    parts = 2 if quick else 4
    root = emptied(folder / "ledger")
    with new_ledger(root) as (ledger, writer):
        for part in range(parts):
            writer.append(generated(16 << 20, seed=part))
        files = segment_files(ledger, "segment_generated")
    size = sum(file.stat().st_size for file in files)

    def scan(verify: bool) -> None:
        with open_ledger(root) as ledger:
            scan_into_torch(ledger.reader(RUN, verify=verify))

    times = interleaved(
        {
            "read": lambda: [file.read_bytes() for file in files],
            "plain": lambda: scan(False),
            "verified": lambda: scan(True),
        },
        5 if quick else 15,
    )
    for name, verified, goal in (("hashes left out", False, 1.0), ("verified", True, 0.5)):
        one = times["verified" if verified else "plain"]
        yield Figure(
            group=GROUP,
            name=f"into torch, {name}, {size / 1e6:.0f} MB",
            against="warm read() of the files",
            ratio=times["read"].seconds / one.seconds,
            goal=goal,
            mb_per_s=size / 1e6 / one.seconds,
            mb_per_cpu_s=size / 1e6 / one.cpu_seconds,
            note=f"{one.seconds * 1e3:.0f} ms against {times['read'].seconds * 1e3:.0f}, opening "
            "the ledger included; every byte of both columns touched",
            details={"ledger_s": one.seconds, "read_s": times["read"].seconds, "size_bytes": size},
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
