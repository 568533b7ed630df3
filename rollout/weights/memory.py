"""The GPU memory of engines that share their GPUs with the trainer: given back, and taken again.

An engine needs `--enable-memory-saver`. Its weights are lost while it sleeps: an update follows.
All of it is for GPUs, and has not been run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ledger.errors import EngineFailed, explain
from rollout.weights.control import EngineControl
from rollout.weights.updater import WeightUpdater

__all__ = ["sleep", "wake_cache", "wake_weights"]


async def sleep(
    updater: WeightUpdater, engines: Sequence[EngineControl], mode: str = "retract"
) -> None:
    """Pause engines and give back everything: weights, KV cache, CUDA graphs.

    Raises EngineFailed where one does not; others may sleep.
    """
    updater.lost(engines)
    for engine in engines:
        answer = await engine.pause(mode)
        if not answer.ok:
            raise _refused(engine, "/pause_generation", answer.message)
    await _all(engines, "/release_memory_occupation", ["kv_cache", "weights", "cuda_graph"])


async def wake_weights(engines: Sequence[EngineControl]) -> None:
    """Take the memory of the weights again: what is in it has no version until an update."""
    await _all(engines, "/resume_memory_occupation", ["weights"])


async def wake_cache(engines: Sequence[EngineControl]) -> None:
    """Take the rest again, after the update and before the release."""
    await _all(engines, "/resume_memory_occupation", ["kv_cache", "cuda_graph"])


async def _all(engines: Sequence[EngineControl], path: str, tags: list[str]) -> None:
    async def one(engine: EngineControl) -> None:
        answer = await engine.post(path, {"tags": tags})
        if not answer.ok:
            raise _refused(engine, path, answer.message)

    await asyncio.gather(*(one(engine) for engine in engines))


def _refused(engine: EngineControl, path: str, found: str) -> EngineFailed:
    return EngineFailed(
        explain(
            "sharing GPUs with an engine",
            on=engine.address + path,
            expected="that it gives its memory back and takes it again",
            found=found,
            do="start it with --sglang-enable-memory-saver",
        )
    )
