"""Many processes append to one run: no failure, no loss, no copy, one order, one chain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.verify import verify_ledger
from tests.ledger.many_writers_child import ROWS

ROOT = Path(__file__).parents[2]


def run(place: Path, catalog: str | None, workers: int, appends: int, kill_every: int) -> int:
    """Let processes append, look at what they left, and say how many were killed."""
    with open_ledger(place, create=True, catalog=catalog) as ledger:
        ledger.create_run("r")
        for worker in range(workers):
            assert ledger.writer("r", producer=f"p{worker}").epoch == 1
    child = subprocess.run(
        [sys.executable, "-m", "tests.ledger.many_writers_child", str(place), catalog or "-"]
        + [str(number) for number in (workers, appends, kill_every)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    with open_ledger(place, catalog=catalog) as ledger:
        report = verify_ledger(ledger)
        assert report.ok, report.lines()
        assert (report.commits, report.rows) == (workers * appends, workers * appends * ROWS)
        assert ledger.run("r").head_seq == workers * appends * ROWS
        reader = ledger.reader("r")
        scores, decisions = (
            reader.table(kind, columns=columns)
            for kind, columns in (
                ("sample_scored", ["seq", "index"]),
                ("sample_decided", ["seq", "index"]),
            )
        )
        expected = [2 * (1_000_000 * w + n) for w in range(workers) for n in range(appends)]
        assert sorted(decisions["index"].to_pylist()) == expected
        assert sorted(scores["index"].to_pylist()) == sorted(
            index + one for index in expected for one in (0, 1)
        )
        seqs = scores["seq"].to_pylist() + decisions["seq"].to_pylist()
        assert sorted(seqs) == list(range(1, workers * appends * ROWS + 1))
    return int(child.stdout)


def test_eight_processes_append_at_once(tmp_path: Path) -> None:
    assert run(tmp_path / "ledger", None, 8, 12, 0) == 0


def test_eight_processes_append_at_once_to_a_server(tmp_path: Path, postgres_url: str) -> None:
    assert run(tmp_path / "ledger", postgres_url, 8, 6, 0) == 0


def test_processes_that_are_killed_and_begin_again(quick_path: Path) -> None:
    assert run(quick_path / "ledger", None, 4, 60, 8) >= 20


def test_processes_that_are_killed_and_begin_again_on_a_server(
    quick_path: Path, postgres_url: str
) -> None:
    assert run(quick_path / "ledger", postgres_url, 4, 20, 10) >= 5


@pytest.mark.slow
def test_four_thousand_groups_by_processes_that_are_killed(tmp_path: Path) -> None:
    assert run(tmp_path / "ledger", None, 4, 1_000, 50) >= 60
