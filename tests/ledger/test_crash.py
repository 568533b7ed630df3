"""SIGKILL anywhere leaves a committed state; many processes at once leave one order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def kills(place: Path, catalog: str, *scenarios: str) -> list[dict[str, Any]]:
    """What the child found after each kill; all that holds for every one has been checked."""
    child = run("crash_child", str(place), catalog, *scenarios)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    *found, last = [json.loads(line) for line in out.splitlines()]
    assert last == {"all_sound": True}
    for kill in found:
        assert kill["sound"], kill
        # Wholly there or not at all; and there, if that was acknowledged.
        assert set(kill["before"]) <= {0, 2}, kill
        for acknowledged, events in zip(kill["told"], kill["before"], strict=True):
            assert events == 2 or not acknowledged, kill
        assert kill["after"] == [2] * len(kill["after"]), kill
        rows = [last - first + 1 for first, last in kill["receipts"]]
        assert kill["receipts"][0][0] == 2, kill
        assert kill["receipts"][-1][1] == kill["head"] == 1 + sum(rows), kill
    return found


def test_a_kill_at_any_point_loses_nothing_and_repeats_nothing(quick_path: Path) -> None:
    catalog = f"sqlite:///{quick_path}/ledger/catalog.sqlite"
    found = kills(quick_path / "ledger", catalog, "small", "alone", "together")
    for scenario in ("small", "alone"):
        of_this = [kill for kill in found if kill["scenario"] == scenario]
        points = [kill["point"] for kill in of_this]
        assert {"create", "write", "fsync", "begin", "commit", "committed"} <= {*points}
        assert ("link" in points) == (scenario == "alone")
        # Nothing shows before the transaction is asked to end; all does once it has ended.
        last = len(points) - 1 - points[::-1].index("commit")
        assert all(kill["before"] == [0] for kill in of_this[: last + 1])
        assert all(kill["before"] == [2] for kill in of_this[last + 1 :])
    assert any(set(kill["before"]) == {0, 2} for kill in found)  # of several at once


def test_a_kill_around_the_commit_on_postgresql(quick_path: Path, postgres_url: str) -> None:
    found = kills(quick_path / "ledger", postgres_url, "small")
    assert "commit" in {kill["point"] for kill in found}
    assert found[-1]["point"] == "committed"
    assert found[-1]["before"] == [2]


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
