"""The main job, shown: `python -m replay.demo --model smollm2|tiny|tiny-moe --output DIR`.

It makes the model, then runs the same commands that a user would type, printing each one first:
a training run from the ledger, a branch re-trained from one of its versions with another advantage
estimator, a replay that compares bits, a question in SQL, the tree of versions, and a picture.
Starting it again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["main"]

_QUESTION = """
select version, count(distinct sample) as samples, count(*) as tokens,
       round(avg(reward), 3) as mean_reward,
       max(abs(rollout_log_prob - log_prob)) as largest_mismatch
from (
    select weight_version as version, index as sample, rollout_log_prob, trainer_log_prob as log_prob,
           reward
    from tokens where weight_version is not null
)
group by version order by version
"""


@dataclass(frozen=True, slots=True)
class Demo:
    """The sizes of one demonstration."""

    model: tuple[str, ...]
    """Arguments of `python -m rollout.models`."""
    title: str
    train: tuple[str, ...]
    fork_at: int
    retrain: tuple[str, ...]
    verify: tuple[str, ...]


DEMOS: dict[str, Demo] = {}


def _run(title: str, command: Sequence[str], shown: str) -> None:
    """Print and run one command; its failure ends the demonstration with its exit code."""
    print(f"\n\033[1m── {title}\033[0m\n$ {shown}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"the command above failed with exit code {code}", file=sys.stderr)
        raise SystemExit(code)
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)
