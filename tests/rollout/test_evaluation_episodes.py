"""Evaluations made of episodes: what one that fails leaves, and what stops all of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from rollout.engines import longest_context
from rollout.episode import Episode
from rollout.evaluation import EvaluationRun
from rollout.evaluation_episodes import evaluate_episodes
from rollout.protocol import SamplingParams
from rollout.rewards import Reward
from rollout.tasks import create_source
from tests.rollout.agents import STOP, ids_of, speaking


class Ones:
    name, version = "ones", "1"

    def __call__(self, sample: Any) -> Reward:
        return Reward(value=1.0)


def evaluated(tokenizer: Any, drive: Any, max_positions: int = 64) -> Any:
    engine = speaking(tokenizer, "abc", max_positions=max_positions)
    run = EvaluationRun(
        name="held-out",
        source=create_source("addition", seed=7),
        reward=Ones(),
        n_prompts=2,
        params=SamplingParams(max_new_tokens=8, temperature=1.0, stop_token_ids=(STOP,)),
        seed=1,
    )
    return asyncio.run(evaluate_episodes(engine, run, drive, tokenizer, 0))


def test_an_episode_that_asks_for_more_than_the_engine_serves_is_nan(tokenizer: Any) -> None:
    async def drive(episode: Episode) -> None:
        await episode.generate()
        if episode.trajectory.index == 0:
            await episode.observe(np.array(ids_of(tokenizer, "a" * 64), np.int32), "tool")
            await episode.generate()

    found = evaluated(tokenizer, drive)
    assert np.isnan(found.rewards[0])
    assert found.rewards[1] == found.mean_reward == 1.0


def test_where_no_episode_can_begin_the_evaluation_stops(tokenizer: Any) -> None:
    async def drive(episode: Episode) -> None:
        await episode.generate()

    with pytest.raises(InvalidArgument, match="within the model's 4 positions"):
        evaluated(tokenizer, drive, max_positions=4)


def test_the_longest_context_of_an_engine(tmp_path: Path) -> None:
    config = {"vocab_size": 8, "max_position_embeddings": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_context("transformers", tmp_path) == 64
    assert longest_context("sglang", tmp_path) == 62
    assert longest_context("sglang", tmp_path, 32) == 30
    assert longest_context("sglang", tmp_path, 1000) == 62
