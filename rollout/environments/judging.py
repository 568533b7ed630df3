"""Rewards inside an environment: what the model says last is judged by a reward function."""

from __future__ import annotations

import numpy as np

from rollout.environments.protocol import Action, EnvironmentTask
from rollout.rewards import Reward, RewardFunction, ScoredSample

__all__ = ["judge"]


def judge(reward: RewardFunction, task: EnvironmentTask, action: Action) -> Reward:
    """What `reward` says of one turn, as if it were the whole response. Raises what it raises."""
    return reward(
        ScoredSample(
            index=0,
            group_index=0,
            rollout_id=0,
            prompt=task.prompt,
            response=action.text,
            tokens=np.asarray(action.tokens, np.int32),
            response_length=len(action.tokens),
            label=task.label,
            metadata=task.metadata,
            finish_reason=action.finish_reason,
        )
    )
