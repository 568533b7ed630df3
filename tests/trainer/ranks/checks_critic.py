"""Steps of a policy with a critic, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.ranks.checks_layouts import ROWS, SIZES, make_batch
from tests.trainer.ranks.checks_packed import PACKED
from trainer.critic import create_critic
from trainer.partition import partition_for, terms_of
from trainer.ranks import data_parallel_size, is_writer
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.step import run_step


def take_steps(folder: Path, parallel: ParallelSettings, *packed: bool) -> dict[str, Any]:
    """Two steps by GAE; what was recorded of the critic, and its weights afterwards.

    Values are in the order of samples whatever the training order was.
    """
    sizes = PACKED if any(packed) else SIZES
    optimizer = OptimizerSettings(lr=1e-2)
    state = create_state(folder, parallel, optimizer, seed=1)
    state.critic = create_critic(folder, state.hf_config, parallel, optimizer, seed=1)
    plan = partition_for(
        np.array([len(row) for row in ROWS]),
        np.arange(len(ROWS)),
        sizes,
        terms_of(parallel, data_parallel_size=data_parallel_size()),
    )
    batch = make_batch(moe=False, order=plan.order_B.tolist())
    algorithm = AlgorithmSettings(advantage_estimator="ppo", lambd=0.9)
    committed, values = [], []
    for step in range(2):
        result = run_step(
            state,
            batch,
            plan,
            algorithm,
            sizes,
            step=step,
            rollout_step=step,
            step_in_rollout=0,
            weight_version_in=step,
            weight_version_out=step + 1,
        )
        committed.append(result.step_committed)
        by_index = sorted(result.signals, key=lambda signal: signal.index)
        values.append(np.concatenate([signal.values for signal in by_index]))
    weights = {n: t.float().numpy().copy() for n, t in state.critic.export_weights()}
    return {
        "roots": [one.critic_root for one in committed],
        "gradients": [one.critic_gradient_digest for one in committed],
        "values": values,
        "metrics": [
            dict(zip(one.metric_names, one.metric_values.tolist(), strict=True))
            for one in committed
        ],
        "weights": weights if is_writer() else None,
    }
