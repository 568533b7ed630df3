"""Ranks are started by torch's launcher and by Ray; one that fails ends all, and says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ledger.errors import InvalidArgument, MissingDependency
from trainer.launch import RankPlan, start_ranks

START = """
import sys
from trainer.launch import RankPlan, start_ranks
if __name__ == "__main__":
    sys.exit(start_ranks(RankPlan(1, 2, sys.argv[1]), "tests.trainer.ranks.light", sys.argv[2:]))
"""


def _start(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_torchs_launcher() -> None:
    done = _start("torchrun", "hello")
    assert (done.returncode, done.stdout) == (0, "hello from rank 0 of 2\n"), done.stderr
    failed = _start("torchrun", "fail", "1")
    assert failed.returncode == 3
    assert failed.stderr == "rank 1 has had enough\n"


def test_ray() -> None:
    failed = _start("ray", "fail", "0")
    assert failed.returncode == 3, failed.stderr
    assert "rank 0 has had enough" in failed.stderr
    done = _start("ray", "hello")
    assert done.returncode == 0, done.stderr
    assert "hello from rank 0 of 2\n" in done.stdout


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="--nnodes 2"):
        start_ranks(RankPlan(2, 1, "torchrun"), "trainer.cli", [])
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"trajectory-ledger\[ray\]"):
        start_ranks(RankPlan(1, 2, "ray"), "trainer.cli", [])
