"""Engines by name. Nothing heavy is imported until one is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.errors import InvalidArgument, explain

if TYPE_CHECKING:
    from rollout.protocol import AsyncEngine, Engine

__all__ = [
    "ENGINE_NAMES",
    "create_async_engine",
    "create_engine",
    "longest_context",
    "own_end_token_ids",
]

ENGINE_NAMES = ("transformers", "sglang")


def create_engine(name: str, model_dir: str | Path, **options: Any) -> Engine:
    """Make the engine `name` for the Hugging Face folder `model_dir`.

    Raises:
        InvalidArgument: no engine of that name, or an option it does not take.
        MissingDependency: it needs something that is not installed.
    """
    if name == "transformers":
        from rollout.engines.transformers_engine import TransformersEngine

        return TransformersEngine(model_dir, **options)
    if name == "sglang":
        from rollout.engines.sglang.create import create_sglang_engine

        return create_sglang_engine(model_dir, **options)
    raise InvalidArgument(
        explain(
            "making an engine",
            on=f"--engine {name}",
            expected=f"one of {', '.join(ENGINE_NAMES)}",
            found=name,
        )
    )


async def create_async_engine(
    name: str, model_dir: str | Path, values: Mapping[str, Any], embedded: Mapping[str, Any]
) -> AsyncEngine:
    """Make, and start, the asynchronous engine `name`, of the event loop that runs this.

    `values` are the options of the command line by name; `embedded` are those that `create_engine`
    takes for an engine in this process.

    Raises:
        InvalidArgument: no engine of that name, or an option it does not take.
        MissingDependency: it needs something that is not installed.
    """
    if name == "sglang":
        from rollout.engines.sglang.create import create_sglang_pool
        from rollout.engines.sglang.settings import sglang_settings
        from rollout.weights import WeightUpdateSettings

        pool = create_sglang_pool(
            model_dir, sglang_settings(values), updates=WeightUpdateSettings.of(values)
        )
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        return pool
    if name != "transformers":
        create_engine(name, model_dir)  # says what the names are
    from rollout.engines.batching import BatchingEngine
    from rollout.engines.transformers_engine import TransformersEngine

    # 'retract' and 'in_place' are the same to it: there is no cache that outlives a batch.
    mode = "abort" if values["pause_generation_mode"] == "abort" else "wait"
    return BatchingEngine(TransformersEngine(model_dir, **embedded), pause_mode=mode)


def own_end_token_ids(name: str, model_dir: str | Path) -> tuple[int, ...]:
    """Ids at which the engine `name` ends a response of this model, whatever it is told.

    They are recorded with those that end an answer, since they do. Raises as `read_model_facts`.
    """
    if name != "sglang":
        return ()
    from rollout.engines.sglang.model import read_model_facts

    return read_model_facts(model_dir).end_token_ids


def longest_context(name: str, model_dir: str | Path, context_length: int | None = None) -> int:
    """Tokens of prompt and response that the engine `name` serves of this model.

    `context_length` is SGLang's argument of that name, where it was given. An attached server may
    have been started for less. Raises as `read_model_facts`.
    """
    from rollout.engines.sglang.model import read_model_facts

    positions = read_model_facts(model_dir).max_positions
    if name != "sglang":
        return positions
    # As `rollout.engines.sglang.server` says: the scheduler cuts 2 below it.
    return min(positions, context_length or positions) - 2
