"""`ledger-train` with a real SGLang, and what its ledger must then hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import replay.cli
from ledger import open_ledger
from ledger.check import check_ledger
from ledger.store import Ledger
from ledger.verify import verify_ledger
from tests.sglang.servers import Served
from trainer.cli import run

__all__ = ["JOB", "checked", "command", "rows", "train"]

JOB: dict[str, Any] = {
    "engine": "sglang",
    "task": "reasoning_gym:spell_backward",
    "custom_rm_path": "tests.sglang.rewards:even",
    "num_rollout": 3,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 80,
    # Ids that random weights sample now and then: lengths have a long tail.
    "rollout_stop_token_ids": list(range(12)),
    "micro_batch_size": 4,
    "seq_length": 128,
    "lr": 1e-3,
    "save_interval": 2,
}


def train(ledger: Path, server: Served, **options: Any) -> dict[str, Any]:
    """`ledger-train` in this process, against a server that runs already."""
    explicit = {
        "ledger": str(ledger),
        "hf_checkpoint": str(server.model),
        "rollout_engine_urls": [server.address],
        **JOB,
        **options,
    }
    return run(explicit, show=False)


def command(ledger: Path, model: Path, **options: Any) -> list[str]:
    """The words of `ledger-train` in a process of its own."""
    words = [sys.executable, "-m", "trainer.cli", "--ledger", str(ledger)]
    words += ["--hf-checkpoint", str(model), "--json"]
    for name, value in {**JOB, **options}.items():
        if value == []:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


@contextmanager
def checked(folder: Path, *, replayed: bool = True) -> Iterator[Ledger]:
    """The ledger, of which everything is asked that it can be: chain, invariants, replay."""
    if replayed:
        assert replay.cli.main(["verify", "--ledger", str(folder)]) == 0
    with open_ledger(folder) as ledger:
        assert verify_ledger(ledger).ok
        found = check_ledger(ledger.reader("run")).findings
        assert not found, found
        yield ledger


def rows(ledger: Ledger, query: str) -> list[dict[str, Any]]:
    """The rows that an SQL query gives."""
    found: list[dict[str, Any]] = ledger.reader("run").sql(query).to_pylist()
    return found
