"""The main job in a second or two: two rollouts of 2 × 4 samples by a model that learned little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.cli import run

TASK = "reasoning_gym:spell_backward"

SMALL: dict[str, Any] = {
    "task": TASK,
    "custom_rm_path": "tests.main_job.rewards:starts_early",
    "num_rollout": 2,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 8,
    "micro_batch_size": 4,
    "seq_length": 24,
    "recompute_logprobs_via_prefill": True,
    "lr": 1e-3,
    "save_interval": 2,
}


def train(ledger: Path, model: Path | None = None, **options: Any) -> dict[str, Any]:
    """`ledger-train` in this process, with the small sizes for what is not given."""
    explicit: dict[str, Any] = {"ledger": str(ledger), **SMALL, **options}
    if model is not None:
        explicit["hf_checkpoint"] = str(model)
    return run(explicit, show=False)


def retrain(ledger: Path, version: int, **options: Any) -> dict[str, Any]:
    """`ledger-train --from-version`, with nothing but what is given."""
    return run({"ledger": str(ledger), "from_version": version, **options}, show=False)


def command_line(ledger: Path, model: Path, **options: Any) -> list[str]:
    """The arguments of `ledger-train` for the same job in a process of its own."""
    words = ["--ledger", str(ledger), "--hf-checkpoint", str(model), "--json"]
    for name, value in {**SMALL, **options}.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


def identity(result: dict[str, Any]) -> tuple[str, str]:
    """What must be equal between two runs of one job."""
    return result["content_digest"], result["weights_root"]
