"""`ledger-train` with an engine that it starts itself, killed at some moment, and resumed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from ledger import open_ledger
from ledger.errors import LedgerError
from tests.sglang.servers import SHARED_ARGUMENTS, START_TIMEOUT_S, option_words
from tests.sglang.training import checked, command, rows


def committed_steps(folder: Path) -> int:
    """Steps that anybody who opens the ledger now sees."""
    try:
        with open_ledger(folder, read_only=True) as ledger:
            return len(rows(ledger, "select step from step_committed"))
    except LedgerError:
        return 0  # not there yet


@pytest.fixture
def words(sglang_python: str, folders: dict[str, Path], tmp_path: Path) -> list[str]:
    """The command; the product asks for experts itself."""
    return [
        *command(
            tmp_path / "ledger",
            folders["moe-0"],
            num_rollout=3,
            partial_rollout=True,
            over_sampling_batch_size=3,
            rollout_engine_python=sglang_python,
            rollout_engine_env=json.dumps({"OMP_NUM_THREADS": "1"}),
            rollout_engine_log_dir=str(tmp_path / "logs"),
        ),
        *option_words(SHARED_ARGUMENTS),
    ]


def test_a_killed_training_leaves_no_engine_and_goes_on(words: list[str], tmp_path: Path) -> None:
    """SIGKILL after the first step. The same command finishes; no prompt is lost or issued twice,
    and all steps are replayed bit for bit."""
    folder = tmp_path / "ledger"
    with (tmp_path / "first").open("wb") as out:
        first = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        while committed_steps(folder) < 1:
            with pytest.raises(subprocess.TimeoutExpired):
                first.wait(0.2)  # it may not end before
        family = psutil.Process(first.pid).children(recursive=True)
        assert any("sglang" in " ".join(one.cmdline()) for one in family)
    finally:
        first.kill()
        first.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []

    again = subprocess.run(words, capture_output=True, text=True, timeout=4 * START_TIMEOUT_S)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["weight_version"] == 3
    with checked(folder) as ledger:
        steps = rows(ledger, "select step from step_committed order by step")
        assert [one["step"] for one in steps] == [0, 1, 2]
        issued = rows(ledger, "select source_row from prompt_issued order by source_row")
        assert [one["source_row"] for one in issued] == list(range(len(issued)))
        kept = rows(ledger, """select "index" from sample_decided where decision = 'kept'""")
        assert len(kept) == len({one["index"] for one in kept}) == 3 * 2 * 4
        loaded = rows(ledger, "select weight_version from weights_loaded order by seq")
        assert [one["weight_version"] for one in loaded][-1] == 3
