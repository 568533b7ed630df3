"""Rewards by type, as slime's --rm-type names them: what an answer is compared by."""

from __future__ import annotations

from rollout.verifiers.types import REWARD_TYPES, create_reward_type

__all__ = ["REWARD_TYPES", "create_reward_type"]
