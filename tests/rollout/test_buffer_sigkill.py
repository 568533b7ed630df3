"""SIGKILL of a real process in the middle of asynchronous rollouts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ledger import open_ledger
from tests.rollout import rollout_child


def test_sigkill_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    where = tmp_path / "ledger"
    command = [sys.executable, "-m", "tests.rollout.rollout_child", str(where), "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 3\n":
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    with open_ledger(where) as ledger:
        before = ledger.reader("run").table("segment_generated").num_rows
        steps = 1 + max(ledger.reader("run").table("sample_decided")["rollout_step"].to_pylist())
    assert steps >= 4
    asyncio.run(rollout_child.main(str(where), steps + 2))
    with open_ledger(where) as ledger:
        reader = ledger.reader("run")
        assert reader.table("segment_generated").num_rows > before
        kept = reader.sql("select index, rollout_step from decisions where decision = 'kept'")
        assert len(set(kept["index"].to_pylist())) == kept.num_rows
        assert Counter(kept["rollout_step"].to_pylist()) == dict.fromkeys(range(steps + 2), 4)
        issued = reader.sql("select source_row from prompt_issued where retry_of is null")
        assert sorted(issued["source_row"].to_pylist()) == list(range(issued.num_rows))
        whole = reader.sql("select index, complete, response_length from trajectories")
        assert all(whole["complete"].to_pylist())
        twice = reader.sql(
            "select index, segment from segment_generated group by all having count(*) > 1"
        )
        assert twice.num_rows == 0
