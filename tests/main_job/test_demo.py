"""The demonstrations, as a newcomer runs them. Minutes: `make test-demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ledger import open_ledger


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "smollm2"])
def test_the_reward_rises_and_the_past_is_reproduced(model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replay.demo", "--model", model, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reproduced bit for bit" in done.stdout
    picture = tmp_path / f"rewards-{model}.png"
    assert done.stdout.splitlines()[-1].endswith(str(picture))
    assert picture.stat().st_size > 10_000
    with open_ledger(tmp_path / f"ledger-{model}") as ledger:
        reader = ledger.reader("run")
        rewards = reader.sql(
            "select weight_version, mean_reward from eval_scored order by weight_version"
        )["mean_reward"].to_pylist()
        assert len(ledger.branches("run")) == 2
    assert rewards[-1] > rewards[0] + 0.2
