"""TensorBoard and W&B get every step of a branch once, whatever stops a process or a sink."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument, MissingDependency
from ledger.events import EvalScored
from tests.main_job.job import train
from trainer import tracking_sinks
from trainer.history import read_history
from trainer.tracking import Tracker, check_tracking, row_of_evaluation, row_of_step
from trainer.tracking_sinks import TensorBoardSink

BOTH = {"use_tensorboard": True, "use_wandb": True, "wandb_mode": "offline"}


def tensorboard_rows(folder: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every number in a folder's files, in order."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    rows = []
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                rows.append((value.tag, int(event.step), value.tensor.float_val[0]))
    return rows


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: a header of 7 bytes, then LevelDB's log format.

    Blocks of 32 KiB hold pieces of (checksum 4 bytes, length 2, kind 1; little-endian) and data;
    kinds: 1 whole, 2 first, 3 middle, 4 last. A block's last bytes below 7 are nothing.
    """
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """What each log call wrote, from the offline files, in order of their runs."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                names = [item.key or ".".join(item.nested_key) for item in items]
                values = [json.loads(item.value_json) for item in items]
                rows.append(dict(zip(names, values, strict=True)))
    return rows


def recorded(ledger: Path) -> list[Any]:
    from ledger.opening import open_ledger

    with open_ledger(str(ledger)) as opened:
        steps = read_history(opened, "run").steps
    return [steps[version] for version in sorted(steps)]


def test_each_committed_step_is_sent_once_with_its_numbers(tiny_dense, tmp_path):
    ledger = tmp_path / "ledger"
    options = {**BOTH, "eval_interval": 1, "n_eval_prompts": 4}
    result = train(ledger, tiny_dense, num_rollout=1, **options)
    assert result["failed_sinks"] == {}
    # The sink loses what it had of the first step: the next process sends it from the ledger.
    shutil.rmtree(ledger / "tensorboard")
    result = train(ledger, num_rollout=3, **options)
    steps = recorded(ledger)
    assert len(steps) == 3
    wanted = sorted(
        (tag, row.step, np.float32(value))
        for row in map(row_of_step, steps)
        for tag, value in row.values.items()
    )
    sent = tensorboard_rows(ledger / "tensorboard")
    trained = sorted(row for row in sent if not row[0].startswith("eval/"))
    np.testing.assert_equal(trained, wanted)
    assert [step for tag, step, _ in sent if tag == "eval/held-out"] == [0, 1, 2, 3]
    logged = wandb_rows(ledger / "wandb-files")
    assert [row["train/step"] for row in logged if "train/loss" in row] == [0, 1, 2]
    assert [row["train/loss"] for row in logged if "train/loss" in row] == [s.loss for s in steps]
    assert [row["eval/step"] for row in logged if "eval/held-out" in row] == [0, 1, 2, 3]


def test_a_sink_that_breaks_ends_no_training_and_is_filled_later(
    tiny_dense, tmp_path, monkeypatch, capsys
):
    ledger = tmp_path / "ledger"
    whole = TensorBoardSink.write

    def breaking(self, step, values, at_s):
        if step == 1:
            raise OSError("disk full")
        whole(self, step, values, at_s)

    monkeypatch.setattr(TensorBoardSink, "write", breaking)
    result = train(ledger, tiny_dense, num_rollout=3, use_tensorboard=True)
    assert result["steps"] == 3
    assert result["failed_sinks"] == {"TensorBoard": "at step 1: OSError: disk full"}
    assert "disk full" in capsys.readouterr().err
    monkeypatch.undo()
    assert {step for _, step, _ in tensorboard_rows(ledger)} == {0}
    train(ledger, num_rollout=4, use_tensorboard=True)
    losses = [(step, value) for tag, step, value in tensorboard_rows(ledger) if tag == "train/loss"]
    assert losses == [(s.step, np.float32(s.loss)) for s in recorded(ledger)]


def test_a_missing_package_is_refused_before_anything_is_written(tmp_path, tiny_dense, monkeypatch):
    monkeypatch.setattr(tracking_sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'trajectory-ledger\[track\]'"):
        train(tmp_path / "ledger", tiny_dense, use_wandb=True)
    assert not (tmp_path / "ledger" / "checkpoints").exists()


def test_a_ledger_in_no_folder_needs_the_sinks_folder():
    values = {"use_tensorboard": True, "use_wandb": False, "tensorboard_dir": None}
    with pytest.raises(InvalidArgument, match="--tensorboard-dir"):
        check_tracking(values, None)


def test_an_evaluation_stands_where_its_version_was_made():
    class Memory:
        name = "memory"

        def __init__(self) -> None:
            self.last: dict[str, int] = {}
            self.rows: list[tuple[int, dict[str, float]]] = []

        def write(self, step, values, at_s):
            self.rows.append((step, dict(values)))

        def close(self):
            pass

    sink = Memory()
    tracker = Tracker([sink], print, steps_of={7: 5})
    event = EvalScored(
        weight_version=7,
        name="held-out",
        source="s",
        source_rows=np.zeros(1, np.int64),
        rewards=np.ones(1),
        response_tokens=[np.zeros(1, np.int32)],
        mean_reward=0.25,
        temperature=1.0,
        seed=0,
        verifier="v",
    )
    tracker.committed(event)
    tracker.committed(event)
    assert sink.rows == [(5, {"eval/held-out": 0.25})]
    assert row_of_evaluation(event, 5).at_s is None
