"""`ledger-rollout` in this process: a run without a trainer, and one that takes turns with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ledger import open_ledger
from ledger.check import check_ledger
from ledger.encode import events_of
from ledger.errors import Diverged, FencedOff, InvalidArgument, NotFound
from ledger.events import SampleDecided
from replay.cli import main as replay
from rollout.cli import run as sample
from tests.main_job.job import SMALL, identity, train
from tests.main_job.test_interruption import Axe, Killed

ROLLOUTS = {
    name: SMALL[name]
    for name in SMALL
    if name not in ("lr", "save_interval", "num_rollout", "micro_batch_size", "seq_length")
}
SHAPE = {"micro_batch_size": 4, "seq_length": 24}
"""Of the forward that engine and trainer share."""


def rollouts(ledger: Path, *, alone: bool = False, **options: Any) -> dict[str, Any]:
    """`ledger-rollout` in this process."""
    return sample({"ledger": str(ledger), **options}, show=False, alone=alone)


def test_a_run_that_rollouts_began_is_taken_up_by_a_trainer(
    tiny_dense: Path, tmp_path: Path
) -> None:
    ledger, model = tmp_path / "ledger", tmp_path / "model"
    shutil.copytree(tiny_dense, model)
    given = {**ROLLOUTS, **SHAPE, "hf_checkpoint": str(model)}
    made = rollouts(ledger, alone=True, num_rollout=1, **given)
    assert (made["kind"], made["rollout_steps"], made["weight_version"]) == ("new run", 1, 0)
    assert rollouts(ledger, alone=True, num_rollout=2)["rollout_steps"] == 1
    with pytest.raises(InvalidArgument, match="n-samples-per-prompt"):
        train(ledger, n_samples_per_prompt=8)
    shutil.move(model, tmp_path / "moved")
    with pytest.raises(NotFound, match="hf-checkpoint"):
        train(ledger)
    shutil.copytree(tmp_path / "moved", model)
    _spoil(model / "model.safetensors")
    with pytest.raises(Diverged, match="blake3"):
        train(ledger)
    shutil.rmtree(model)
    # How it is trained was open until now: another lr and number of steps than the defaults.
    trained = train(ledger, tmp_path / "moved", lr=1e-3, num_steps_per_rollout=2)
    assert (trained["kind"], trained["steps"], trained["weight_version"]) == ("resume", 4, 4)
    with pytest.raises(InvalidArgument, match=r"lr 0\.001"):
        train(ledger, lr=1e-4)
    with open_ledger(ledger, read_only=True) as opened:
        reader = opened.reader("run", branch=None)
        assert check_ledger(reader).ok
        versions = reader.sql("select distinct unnest(span_versions) as v from segment_generated")
        assert versions["v"].to_pylist() == [0]
    assert replay(["verify", "--ledger", str(ledger), "--json"]) == 0


def _spoil(path: Path) -> None:
    """Change the last bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)


def test_taking_turns_is_the_same_run_and_so_it_is_when_rollouts_are_killed_anywhere(
    tiny_dense: Path, tmp_path: Path
) -> None:
    options = {"num_steps_per_rollout": 2, "eval_interval": 1, "n_eval_prompts": 4}
    whole = train(tmp_path / "whole", tiny_dense, num_rollout=2, **options)
    ledger = tmp_path / "turns"
    with pytest.raises(NotFound, match="rollout step 0"):
        train(
            ledger,
            tiny_dense,
            num_rollout=2,
            rollout_by="elsewhere",
            rollout_timeout_minutes=1e-3,
            **options,
        )
    with pytest.raises(NotFound, match="the weights of rollout step 1"):
        rollouts(ledger, num_rollout=2, rollout_timeout_minutes=1e-3)
    train(ledger, num_rollout=1)
    killed = 0
    while True:
        with pytest.MonkeyPatch.context() as monkeypatch:
            axe = Axe(monkeypatch, killed)
            try:
                rollouts(ledger, num_rollout=2, rollout_timeout_minutes=1e-3)
            except Killed:
                killed += 1
                continue
            except NotFound:
                assert len(axe.points) <= killed  # it only waits for the last version now
                break
    assert killed >= 8
    after = train(ledger, num_rollout=2)
    assert rollouts(ledger, num_rollout=2)["weight_version"] == 4
    with open_ledger(ledger) as opened:
        assert opened.content_digest("run").hex() == whole["content_digest"]
        assert check_ledger(opened.reader("run", branch=None)).ok
        assert after["weights_root"] == identity(whole)[1]
        # A trainer that makes its own rollouts again ends those that are still made elsewhere.
        still_there = opened.writer("run", producer="ledger-rollout/main")
        train(ledger, num_rollout=3, rollout_by="trainer")
        again = opened.reader("run").table("sample_decided").slice(0, 1)
        with pytest.raises(FencedOff):
            still_there.append(events_of(again, SampleDecided))
