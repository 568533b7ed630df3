"""SIGKILL anywhere leaves a committed state; many processes at once leave one order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.verify import verify_ledger

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.ledger.{module}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("way", "naming"), [("packed", "before fsync"), ("alone", "after link")])
def test_a_kill_at_any_point_loses_nothing_and_repeats_nothing(
    tmp_path: Path, way: str, naming: str
) -> None:
    child = run("crash_child", str(tmp_path), way)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    lines = out.splitlines()
    points, states = lines[::2], [json.loads(line) for line in lines[1::2]]
    assert {"before write", "within write", "before fsync", naming, "before transaction"} <= {
        *points
    }
    assert points[-1] == "after commit"
    committed = points.index("after commit")  # what follows writes the links of the commit
    for number, (point, state) in enumerate(zip(points, states, strict=True)):
        expected = 4 if number >= committed else 1
        assert state == {
            "head": expected,
            "ok_before": True,
            "receipt": [2, 4],
            "ok_after": True,
            "scores": [0, 1],
            "final": 4,
        }, point


def test_four_processes_create_and_append_at_once(tmp_path: Path) -> None:
    folder, appends = tmp_path / "ledger", 8
    children = [run("append_child", str(folder), str(n), str(appends)) for n in range(4)]
    for child in children:
        _, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
    with open_ledger(folder) as ledger:
        assert verify_ledger(ledger).ok
        assert ledger.run("r").head_seq == 4 * appends * 3
        scores = ledger.reader("r").table("sample_scored")
        assert sorted(scores["index"].to_pylist()) == list(range(4 * appends * 2))
        seqs = [
            seq
            for kind in ("sample_scored", "sample_decided")
            for seq in ledger.reader("r").table(kind)["seq"].to_pylist()
        ]
        assert sorted(seqs) == list(range(1, 4 * appends * 3 + 1))
