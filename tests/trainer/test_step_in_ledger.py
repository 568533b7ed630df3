"""A step's events in a real ledger: taken by its invariants, and the batch comes from its files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ledger import open_ledger
from ledger.encode import table_to_events
from ledger.errors import Conflict, NotFound
from tests.trainer.memory import MemoryReader, observation, prompt, score, segment
from tests.trainer.tiny_policy import make_folder, make_state
from trainer.batch import batch_digest, load_batch
from trainer.compare import compare_steps
from trainer.microbatch import recorded_partition
from trainer.partition import partition_for
from trainer.settings import AlgorithmSettings, BatchSettings
from trainer.step import run_step
from trainer.step_events import weights_event

SIZES = BatchSettings(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    num_steps_per_rollout=1,
    micro_batch_size=2,
)
NUMBERS = {
    "step": 0,
    "rollout_step": 0,
    "step_in_rollout": 0,
    "weight_version_in": 0,
    "weight_version_out": 1,
}


def rollout_events():
    return [
        prompt([0, 1], [1, 2, 3], group=0),
        prompt([2, 3], [5, 6], group=1),
        segment(0, [7, 8, 9], [-0.5, -0.0, -1.5]),
        segment(1, [4]),
        segment(2, [8, 9], group_index=1),
        observation(2, [30], start=2),
        segment(2, [11], start=3, number=1, group_index=1),
        segment(3, [13, 14], group_index=1),
        *(score(i, r) for i, r in enumerate([1.0, 0.0, 0.0, 1.0])),
    ]


def test_append_read_and_run_again(tmp_path):
    folder = make_folder(tmp_path / "model")
    state = make_state(folder)
    start = weights_event(state.tensor_records(), weight_version=0, parent_version=0, step=0)
    start = dataclasses.replace(start, parent_version=None, step=None)
    indices = np.array([3, 0, 2, 1])
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        with ledger.writer("run", producer="test") as writer:
            writer.append([start])
            for event in rollout_events():  # a commit, and so a file, each
                writer.append([event])
            batch = load_batch(ledger.reader("run"), indices)
            lengths = batch.prompt_lengths_B + batch.response_lengths_B
            plan = partition_for(lengths, indices, SIZES)
            result = run_step(state, batch, plan, AlgorithmSettings(), SIZES, **NUMBERS)
            writer.append([result.step_committed, *result.signals, result.weights])
            twice = dataclasses.replace(result.step_committed, step=1, weight_version_out=2)
            with pytest.raises(Conflict, match="sample"):
                writer.append([twice])
    assert batch_digest(batch) == batch_digest(load_batch(MemoryReader(rollout_events()), indices))

    with open_ledger(tmp_path / "ledger") as ledger:
        reader = ledger.reader("run")
        (recorded,) = table_to_events(reader.table("step_committed"))
        weights = table_to_events(reader.table("weights_published"))[-1]
        batch = load_batch(reader, recorded.indices)
        plan = recorded_partition(recorded)
        again = run_step(make_state(folder), batch, plan, AlgorithmSettings(), SIZES, **NUMBERS)
        assert compare_steps(recorded, again.step_committed, weights, again.weights) is None
        with pytest.raises(NotFound, match=r"samples \[4\]"):
            load_batch(reader, [4])
