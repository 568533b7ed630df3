"""`ledger-run` with a real model: a rank, an engine, a worker and the head itself are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ledger import Ledger, open_ledger
from ledger.waiting import wait_for
from tests.main_job.job import SMALL
from tests.two_commands.test_two_commands import assert_complete, count, words

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
LAYOUT = """
device = "cpu"
[engines]
number = 2
[workers]
number = 2
"""
OPTIONS = {
    **{k: v for k, v in SMALL.items() if k != "recompute_logprobs_via_prefill"},
    "num_rollout": 5,
    "num_steps_per_rollout": 2,
}


def _until(ledger: Ledger, seen: Callable[[], bool], what: str) -> None:
    wait_for(ledger, "run", lambda: seen() or None, what=what, timeout_s=600, whole_run=False)


def _actors(name: str, parent: int) -> list[int]:
    """Processes of an actor's class below `parent`, as Ray names them."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if title.startswith(f"ray::{name}") and parent in _ancestors(int(folder.name)):
            found.append(int(folder.name))
    return found


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def test_each_of_them_is_killed(tiny_dense: Path, tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text(LAYOUT)
    command = [sys.executable, "-m", "rollout.ray.cli", "--layout", str(tmp_path / "layout.toml")]
    command += words(**OPTIONS, ledger=tmp_path / "ledger", hf_checkpoint=tiny_dense)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def kill(name: str, parent: int) -> None:
        found = _actors(name, parent)
        assert found, name
        os.kill(found[0], signal.SIGKILL)

    process = start()
    with open_ledger(tmp_path / "ledger", create=True) as ledger:

        def issued(rollout_step: int) -> bool:
            assert process.poll() is None
            begun = any(run.head_seq for run in ledger.runs())
            return begun and count(ledger, "prompt_issued", rollout_step) > 0

        for rollout_step, name in enumerate(("WorkerActor", "EngineActor", "_Rank")):
            _until(ledger, partial(issued, rollout_step), f"rollout step {rollout_step}")
            kill(name, process.pid)
        _until(ledger, partial(issued, 3), "rollout step 3")
        process.kill()  # the head of the cluster ends with it
        process.wait()
        process = start()
        assert process.wait(600) == 0
        assert_complete(ledger)
        assert set(ledger.reader("run").table("step_committed")["rollout_step"].to_pylist()) == {
            *range(OPTIONS["num_rollout"])  # type: ignore[arg-type]
        }
