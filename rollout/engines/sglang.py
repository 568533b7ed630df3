"""The name `sglang`: says what is needed. The adapter itself is not written yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NoReturn

from ledger.errors import MissingDependency, explain

__all__ = ["create_sglang_engine"]


def create_sglang_engine(model_dir: str | Path, **_options: Any) -> NoReturn:
    """Refuse, saying what SGLang needs and what this project lacks.

    Raises:
        MissingDependency: always.
    """
    installed = importlib.util.find_spec("sglang") is not None
    raise MissingDependency(
        explain(
            "making an engine",
            on=f"--engine sglang for {model_dir}",
            expected="the package sglang and this project's adapter for it",
            found=("sglang is installed" if installed else "sglang is not installed")
            + "; the adapter is not built yet",
            do="use --engine transformers. SGLang itself needs a CUDA GPU (pip install sglang) or "
            "its CPU build (SGLANG_USE_CPU_ENGINE=1, --device cpu), and is launched with "
            f"python -m sglang.launch_server --model-path {model_dir}",
        )
    )
