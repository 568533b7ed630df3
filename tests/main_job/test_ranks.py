"""The commands over two ranks: killed, gone on with, run again; the same numbers as one rank's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ledger import open_ledger
from tests.main_job.job import command_line, identity
from tests.trainer.ranks import checks_command
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = {"num_rollout": 2, "save_interval": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "data": {"data_parallel_size": 2, "async_save": True, "use_distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def ranks() -> Any:
    pair = Pair()
    yield pair
    pair.close()


def _json(answers: list[tuple[int, str, str]]) -> dict[str, Any]:
    """What rank 0 printed; the other printed nothing."""
    (code, printed, errors), other = answers
    assert code == 0, errors
    assert other == (0, "", ""), other
    return json.loads(printed)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_killed_gone_on_with_and_run_again(
    ranks: Pair, tiny_dense: Path, tmp_path: Path, name: str
) -> None:
    layout = ParallelSettings()
    words = command_line(tmp_path / "whole", tiny_dense, **STEPS, **LAYOUTS[name])
    whole = _json(ranks.run(checks_command.train, words, layout=layout, deadline_s=120))
    words = command_line(tmp_path / "cut", tiny_dense, **STEPS, **LAYOUTS[name])
    # Where rank 0 ends, the other waits for its word: in these processes no connection breaks.
    kind = "sample_decided" if "async_save" in LAYOUTS[name] else "checkpoint_saved"
    ended = ranks.run(checks_command.train_until, words, kind, 2, deadline_s=120)
    assert ended == ["killed", "ended with 137"]
    again = _json(ranks.run(checks_command.train, words, deadline_s=120))
    assert identity(again) == identity(whole)
    with open_ledger(tmp_path / "cut", read_only=True) as ledger:
        saved = ledger.reader("run", branch=None).table("checkpoint_saved")
    assert saved["format"].to_pylist()[0] == "hf-safetensors-1"
    assert set(saved["format"].to_pylist()[1:]) == {"torch_dist-1"}
    report = _json(
        ranks.run(
            checks_command.replay,
            ["verify", "--ledger", str(tmp_path / "cut"), "--json"],
            deadline_s=120,
        )
    )
    assert (report["reproduced"], report["steps"], report["recorded_only"]) == (True, 2, 0)
