"""A step with a loss and corrections that look at the whole step, on however many ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.test_step import NUMBERS, SIZES, make_batch, make_state
from trainer.partition import PartitionTerms, partition_for
from trainer.ranks import data_parallel_size
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings
from trainer.step import run_step


def take(folder: Path, algorithm: AlgorithmSettings) -> dict[str, Any]:
    """A later step of its rollout, whose old log-probs lie beside the current ones."""
    sizes = dataclasses.replace(SIZES, micro_batch_size=1)
    batch = make_batch()
    lengths = batch.prompt_lengths_B + batch.response_lengths_B
    state = make_state(folder)
    plan = partition_for(
        lengths, batch.indices_B, sizes, PartitionTerms(data_parallel_size=data_parallel_size())
    )
    old = score_policy(state, batch, plan)
    old += np.float32(0.3) * np.sin(np.arange(len(old), dtype=np.float32))
    numbers = NUMBERS | {"step_in_rollout": 1}
    result = run_step(state, batch, plan, algorithm, sizes, old_log_probs_N=old, **numbers)
    return {
        "ranks": plan.ranks_M.tolist(),
        "loss": result.step_committed.loss,
        "weights": result.weights.root,
        "metrics": result.metrics,
        "correction_weights": [signal.correction_weights for signal in result.signals],
    }
