"""Engines by name. Nothing heavy is imported until one is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.errors import InvalidArgument, explain

if TYPE_CHECKING:
    from rollout.protocol import Engine

__all__ = ["ENGINE_NAMES", "create_engine"]

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
