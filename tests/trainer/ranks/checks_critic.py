"""Steps of a policy with a critic, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.ranks.checks_layouts import SIZES, make_batch
from trainer.critic import create_critic
from trainer.partition import partition_for, terms_of
from trainer.ranks import data_parallel_size, is_writer
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.step import run_step


def take_steps(folder: Path, parallel: ParallelSettings) -> dict[str, Any]:
    """Two steps by GAE; what was recorded of the critic, and its weights afterwards."""
    optimizer = OptimizerSettings(lr=1e-2)
    state = create_state(folder, parallel, optimizer, seed=1)
    state.critic = create_critic(folder, state.hf_config, parallel, optimizer, seed=1)
    batch = make_batch(moe=False)
    plan = partition_for(
        batch.prompt_lengths_B + batch.response_lengths_B,
        batch.indices_B,
        SIZES,
        terms_of(parallel, data_parallel_size=data_parallel_size()),
    )
    algorithm = AlgorithmSettings(advantage_estimator="ppo", lambd=0.9)
    committed, values = [], []
    for step in range(2):
        result = run_step(
            state,
            batch,
            plan,
            algorithm,
            SIZES,
            step=step,
            rollout_step=step,
            step_in_rollout=0,
            weight_version_in=step,
            weight_version_out=step + 1,
        )
        committed.append(result.step_committed)
        values.append(np.concatenate([signal.values for signal in result.signals]))
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
