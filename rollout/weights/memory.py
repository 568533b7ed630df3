"""The GPU memory of an engine that shares its GPUs with the trainer: given back, and taken again.

An engine needs `enable_memory_saver`. Its weights are lost meanwhile. It is for GPUs, and has not
been run on one.
"""

from __future__ import annotations

from ledger.errors import EngineFailed, InvalidArgument, explain
from rollout.weights.control import EngineControl

__all__ = ["give_memory_back", "take_memory"]

_TAGS = ["kv_cache", "weights", "cuda_graph"]


async def give_memory_back(engine: EngineControl, pause_mode: str) -> None:
    """Pause an engine, and let it give back weights, KV cache and CUDA graphs.

    Raises:
        InvalidArgument: it was started without what it needs for that; nothing was done.
        EngineFailed: it did not.
    """
    info = await engine.info()
    if not info.arguments.get("enable_memory_saver"):
        raise InvalidArgument(
            explain(
                "sharing GPUs with an engine",
                on=engine.address,
                expected="one that was started with enable_memory_saver",
                found="one that keeps its memory, whatever it is asked",
                do="leave --offload-rollout out",
            )
        )
    answer = await engine.pause(pause_mode)
    if not answer.ok:
        raise _refused(engine, "/pause_generation", answer.message)
    answer = await engine.post("/release_memory_occupation", {"tags": _TAGS})
    if not answer.ok:
        raise _refused(engine, "/release_memory_occupation", answer.message)


async def take_memory(engine: EngineControl) -> None:
    """The other way round: its weights have no version then. Raises EngineFailed."""
    answer = await engine.post("/resume_memory_occupation", {"tags": _TAGS})
    if not answer.ok:
        raise _refused(engine, "/resume_memory_occupation", answer.message)


def _refused(engine: EngineControl, path: str, found: str) -> EngineFailed:
    return EngineFailed(
        explain(
            "sharing GPUs with an engine",
            on=engine.address + path,
            expected="that it gives its memory back and takes it again",
            found=found,
            do="look into the engine's log",
        )
    )
