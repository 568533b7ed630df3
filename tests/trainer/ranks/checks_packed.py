"""A step over packed micro-batches in any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.ranks.checks_layouts import ROWS, SIZES, make_batch
from trainer.partition import partition_for, terms_of
from trainer.ranks import data_parallel_size
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.step import run_step

PACKED = dataclasses.replace(SIZES, use_dynamic_batch_size=True, max_tokens_per_gpu=11)


def take_step(folder: Path, parallel: ParallelSettings) -> dict[str, Any]:
    """What it recorded, log-probs in the order of samples whatever the training order was."""
    state = create_state(folder, parallel, OptimizerSettings(lr=1e-2), seed=1)
    lengths = np.array([len(row) for row in ROWS])
    terms = terms_of(parallel, data_parallel_size=data_parallel_size())
    plan = partition_for(lengths, np.arange(4), PACKED, terms)
    moe = state.model.config.num_moe_experts is not None
    batch = make_batch(moe=moe, order=plan.order_B.tolist())
    scored = score_policy(state, batch, plan)
    result = run_step(
        state,
        batch,
        plan,
        AlgorithmSettings(entropy_coef=0.01),
        PACKED,
        step=0,
        rollout_step=0,
        step_in_rollout=0,
        weight_version_in=0,
        weight_version_out=1,
    )
    by_index = sorted(result.signals, key=lambda signal: signal.index)
    place = np.argsort(batch.indices_B)
    parts = np.split(scored, batch.offsets_N[1:-1])
    committed = result.step_committed
    return {
        "log_probs": np.concatenate([signal.log_probs for signal in by_index]),
        "scored": np.concatenate([parts[i] for i in place]),
        "loss": committed.loss,
        "grad_norm": committed.grad_norm,
        "metrics": result.metrics,
        "indices": committed.indices.tolist(),
        "ranks": committed.micro_batch_ranks.tolist(),
        "widths": committed.micro_batch_widths.tolist(),
        "root": result.weights.root,
    }
