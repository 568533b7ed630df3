"""What the actors of the tests are made of: an engine without a model, and an agent of turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.engines.scripted_async import ManualClock, ScriptedAsyncEngine, length_script
from rollout.episode import Episode
from rollout.ray.worker_actor import WorkerServices
from rollout.rewards import Reward, ScoredSample
from rollout.settings import RolloutSettings
from rollout.trajectory import Segment

WEIGHTS = {"w": np.zeros(1, np.float32)}
TURNS, TOKENS = 3, 5
SETTINGS = RolloutSettings(
    run_seed=11,
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    rollout_max_response_len=TOKENS,
)


class RealClock(ManualClock):
    """Seconds that pass by themselves."""

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.monotonic()

    @now.setter
    def now(self, value: float) -> None:
        pass

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def engine(token_s: float) -> ScriptedAsyncEngine:
    """An engine that takes `token_s` for a token, and never stops by itself."""
    return ScriptedAsyncEngine(
        length_script(lambda request: 1 << 20),
        clock=RealClock(),
        token_s=token_s,
        weights=WEIGHTS,
    )


class Tokens:
    """A tokenizer of one token a character; no text is needed here."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] if text == "\n" else [1 + ord(c) % 60 for c in text[-4:]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids)

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, Any]:
        return {"input_ids": [[int(i) for i in text.split()] for text in texts]}


class ByIndex:
    """Rewards that differ inside every group of two."""

    name, version = "by-index", "1"

    def __call__(self, sample: ScoredSample) -> Reward:
        return Reward(value=float(sample.index % 2))


async def turns(episode: Episode) -> None:
    """An agent that goes on for TURNS turns, with two tokens of a tool between them."""
    while True:
        at = episode.trajectory
        last = at.pieces[-1] if at.pieces else None
        if isinstance(last, Segment) and at.sampled_in_turn >= TOKENS:
            if len({piece.turn for piece in at.segments}) == TURNS:
                return
            await episode.observe(np.array([5, 6], np.int32), "tool")
        await episode.generate()


def services() -> WorkerServices:
    """Of a worker."""
    return WorkerServices(
        tokenizer=Tokens(), drive=turns, reward=ByIndex(), run_seed=11, source="tests"
    )
