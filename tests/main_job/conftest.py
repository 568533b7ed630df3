"""A finished small run, dense and with experts, made once a session; tests copy it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.main_job.job import train


@pytest.fixture(scope="session")
def dense_run(
    tiny_dense: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The ledger of an uninterrupted run of four rollouts, and what the command printed."""
    ledger = tmp_path_factory.mktemp("main-job") / "dense"
    return ledger, train(ledger, tiny_dense, num_rollout=4)


@pytest.fixture
def copied(dense_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the finished run that a test may damage or continue."""
    ledger, result = dense_run
    shutil.copytree(ledger, tmp_path / "ledger")
    return tmp_path / "ledger", result


@pytest.fixture(scope="session")
def moe_run(
    tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """As `dense_run`, with a mixture-of-experts model, two rollouts."""
    ledger = tmp_path_factory.mktemp("main-job") / "moe"
    return ledger, train(ledger, tiny_moe)
