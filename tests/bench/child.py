"""What is measured in a process of its own: `python -m tests.bench.child WHAT LEDGER RUN`.

It prints one JSON object of numbers whose names say the unit. Imports are timed apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["FIRST_QUESTION", "SECOND_QUESTION", "in_new_process"]

FIRST_QUESTION = """
SELECT step, weight_version_out, loss, metrics['entropy'] AS entropy, batch_size
FROM steps ORDER BY step DESC LIMIT 10
"""
SECOND_QUESTION = """
SELECT rollout_step, avg(reward) AS reward, count(*) AS samples
FROM samples GROUP BY rollout_step ORDER BY rollout_step DESC LIMIT 10
"""
_ROOT = Path(__file__).parents[2]


def in_new_process(what: str, ledger: Path, run_id: str) -> dict[str, float]:
    """Measure `what` in a new process. Raises CalledProcessError if it failed."""
    command = [sys.executable, "-m", "tests.bench.child", what, str(ledger), run_id]
    done = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _query(place: str, run_id: str) -> dict[str, float]:
    """Open, ask a first question of one small kind, then one of all samples."""
    began = time.perf_counter()
    import pyarrow as pa
    import sqlalchemy.dialects.sqlite  # noqa: F401 — SQLAlchemy imports it at its first connection

    import ledger.sql  # noqa: F401 — so that the import is not in the time of the first question
    from ledger import open_ledger

    pa.array([0])  # pyarrow imports pandas here, where it is installed

    imported, cpu = time.perf_counter(), time.process_time()
    with open_ledger(place) as opened:
        ready = time.perf_counter()
        opened.reader(run_id).sql(FIRST_QUESTION)
        first, first_peak = time.perf_counter(), _peak_bytes()
        first_cpu = time.process_time() - cpu
        opened.reader(run_id).sql(SECOND_QUESTION)
        second = time.perf_counter()
    return {
        "imports_s": imported - began,
        "open_s": ready - imported,
        "first_s": first - imported,
        "first_cpu_s": first_cpu,
        "first_peak_bytes": first_peak,
        "second_s": second - first,
        "peak_bytes": _peak_bytes(),
    }


def _scan(place: str, run_id: str) -> dict[str, float]:
    """A warm read() of the files, then the first, second and third scan into torch."""
    began = time.perf_counter()
    import pyarrow as pa
    import torch  # noqa: F401 — its import is no part of the scan

    from ledger import open_ledger
    from tests.bench.samples import segment_files
    from tests.bench.scans import scan_into_torch

    pa.array([0])  # pyarrow imports pandas here, where it is installed

    imported = time.perf_counter()
    with open_ledger(place) as opened:
        files = segment_files(opened, "segment_generated")
    for _ in range(2):
        at = time.perf_counter()
        for file in files:
            file.read_bytes()
        read = time.perf_counter() - at
    taken = []
    at = time.perf_counter()
    with open_ledger(place) as opened:
        for _ in range(3):
            scan_into_torch(opened.reader(run_id))
            taken.append(time.perf_counter() - at)
            at = time.perf_counter()
    return {
        "imports_s": imported - began,
        "read_s": read,
        "first_s": taken[0],
        "second_s": taken[1],
        "third_s": taken[2],
    }


def _peak_bytes() -> int:
    """Largest resident memory of this process so far, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM")


_MEASURES: dict[str, Callable[[str, str], dict[str, float]]] = {"query": _query, "scan": _scan}

if __name__ == "__main__":
    print(json.dumps(_MEASURES[sys.argv[1]](sys.argv[2], sys.argv[3]), sort_keys=True))
