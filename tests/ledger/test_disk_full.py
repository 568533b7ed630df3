"""Disks that are full or read-only: the error says so, nothing shows, and repeating succeeds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def outcome(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["sound"]
    assert found["head"] == 4 + 1 + 2
    assert found["routing"] == 1
    assert found["scores"] == [100, 101, 102, 103, 1]
    # Bytes that nobody refers to may stay, whole, under the name of their content; no halves.
    assert not [path for path in found["litter"] if ".tmp-" in path], found["litter"]
    for part in ("\n  found:    ", "\n  do:       "):
        assert part in found["big"]
        assert part in found["commit"]
    return found


def in_own_mounts(folder: Path, mount: str, mode: str) -> dict[str, Any]:
    """The child in a mount namespace of its own, after `mount`."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no file system can be mounted for this test")
    probe = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, cwd=folder
    )
    if probe.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()[:200]}")
    inner = f'{mount} && cd "$3" && exec "$0" -m tests.ledger.full_disk_child "$1" "$2"'
    shell = ["unshare", "-rm", "sh", "-c", f'cd "$1" && {inner}']
    return outcome([*shell, sys.executable, str(folder), mode, str(ROOT)])


def test_a_disk_that_fills_up(quick_path: Path) -> None:
    found = in_own_mounts(quick_path, "mount -t tmpfs -o size=2m none .", "full")
    assert "No space left" in found["big"]
    assert "database or disk is full" in found["commit"]
    assert found["tries"] >= 2
    assert found["litter"] == []


def test_a_place_that_becomes_read_only(quick_path: Path) -> None:
    found = in_own_mounts(quick_path, "mount -t tmpfs -o size=8m none .", "read-only")
    assert "Read-only file system" in found["big"]
    assert "Read-only file system" in found["commit"]


def test_a_limit_on_the_size_of_files(quick_path: Path) -> None:
    """The same without mounting anything: this one runs everywhere."""
    found = outcome(
        [sys.executable, "-m", "tests.ledger.full_disk_child", str(quick_path), "file-size"]
    )
    assert "File too large" in found["big"]
    assert "the catalog did not take a commit" in found["commit"]
    assert found["litter"] == []
