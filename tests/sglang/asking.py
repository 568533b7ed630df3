"""Requests of the tests, and the product's client to send them with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.model import read_model_facts
from rollout.protocol import GenerationRequest, SamplingParams

__all__ = ["FREE", "client_of", "prompt", "request", "until"]

FREE = SamplingParams(temperature=1.0, max_new_tokens=24)


def prompt(number: int, length: int = 12) -> Any:
    """[length] int32 A prompt of its own for each number: bytes of text, no special ids."""
    return np.random.default_rng(number).integers(0, 256, length).astype(np.int32)


def request(number: int, *, tokens: Any = None, **changes: Any) -> GenerationRequest:
    """Sample `number`, with that seed and a name of its own."""
    return GenerationRequest(
        **{
            "index": number,
            "tokens": prompt(number) if tokens is None else np.asarray(tokens, dtype=np.int32),
            "seed": 1000 + number,
            "request_id": f"run.main.{number}.0",
            **changes,
        }
    )


@asynccontextmanager
async def client_of(address: str, folder: Path) -> AsyncIterator[SGLangClient]:
    """An open client of the server at `address`, which serves the model in `folder`."""
    client = SGLangClient(address, read_model_facts(folder))
    try:
        await client.open()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    """Return once `condition`, which asks another process, holds. Raises TimeoutError."""
    import asyncio

    async def asking() -> None:
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)

    await asyncio.wait_for(asking(), limit_s)
