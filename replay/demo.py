"""The main job, shown: `python -m replay.demo --model smollm2|tiny|tiny-moe --output DIR`.

It makes the model, then runs the commands that a user would type, each printed first: a training
run, a branch re-trained from one of its versions with another advantage estimator, a replay that
compares bits, a question in SQL, the tree of versions, and a picture. Started again with the same
folder, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["main"]

_QUESTION = """
with sampled as (
    select index, any_value(weight_version) as version, count(*) as tokens,
           avg(rollout_log_prob) as log_prob,
           max(abs(log_prob - rollout_log_prob)) as mismatch
    from tokens where weight_version is not null group by index
)
select t.version, count(*) as samples, sum(t.tokens)::bigint as tokens,
       round(avg(s.raw_reward), 3) as mean_reward,
       round(avg(t.log_prob), 3) as mean_log_prob,
       count(*) filter (s.decision = 'filtered') as dropped,
       max(t.mismatch) as largest_trainer_rollout_mismatch
from sampled as t join samples as s on s.index = t.index
group by t.version order by t.version
"""


@dataclass(frozen=True, slots=True)
class Demo:
    """The sizes of one demonstration."""

    title: str
    model: tuple[str, ...]
    """Arguments of `python -m rollout.models`."""
    train: tuple[str, ...]
    fork_at: int
    retrain: tuple[str, ...]
    verify: tuple[str, ...]


_TINY = (
    *("--task", "reasoning_gym:spell_backward"),
    *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
    *("--over-sampling-batch-size", "4", "--rollout-max-response-len", "6"),
    *("--num-rollout", "14", "--num-steps-per-rollout", "2", "--lr", "1e-3"),
    *("--micro-batch-size", "64", "--seq-length", "20", "--recompute-logprobs-via-prefill"),
    *("--save-interval", "5", "--eval-interval", "5", "--n-eval-prompts", "128"),
)
_SHORT_WORDS = ("--task-options", '{"min_word_len": 3, "max_word_len": 3}')
"""Experts see fewer tokens each, and learn words of three letters in the time there is."""

DEMOS = {
    "smollm2": Demo(
        title="SmolLM2-135M-Instruct learns to answer a sum with the number alone",
        model=("smollm2",),
        train=(
            *("--task", "addition", "--num-threads", "2"),
            *("--num-rollout", "10", "--rollout-batch-size", "5", "--n-samples-per-prompt", "8"),
            *("--over-sampling-batch-size", "3", "--rollout-max-response-len", "3"),
            *("--micro-batch-size", "20"),
            *("--lr", "3e-6", "--save-interval", "4"),
            *("--eval-interval", "2", "--n-eval-prompts", "64"),
        ),
        fork_at=8,
        retrain=("--eval-interval", "2"),
        verify=("--from-version", "8"),
    ),
    "tiny": Demo(
        title="a character model of 0.1 million parameters learns to spell backward",
        model=("tiny",),
        train=_TINY,
        fork_at=20,
        retrain=("--eval-interval", "5"),
        verify=("--from-version", "20"),
    ),
    "tiny-moe": Demo(
        title="a mixture-of-experts character model learns to spell three letters backward",
        model=("tiny", "--moe", *_SHORT_WORDS),
        train=(*_TINY, *_SHORT_WORDS),
        fork_at=20,
        retrain=("--eval-interval", "5"),
        verify=("--from-version", "20"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one demonstration; returns 0, or the exit code of the command that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m replay.demo",
        description="Train from a ledger, re-train a branch, replay bit for bit, ask, draw.",
    )
    parser.add_argument("--model", choices=sorted(DEMOS), default="tiny", help="what is trained")
    parser.add_argument(
        "--output", default="demo-out", help="folder for models, ledger and picture"
    )
    arguments = parser.parse_args(argv)
    demo = DEMOS[arguments.model]
    output = Path(arguments.output)
    model = output / "models" / arguments.model
    ledger = output / f"ledger-{arguments.model}"
    picture = output / f"rewards-{arguments.model}.png"
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    branch = f"v{demo.fork_at}-rloo"
    at = ("--ledger", str(ledger))
    steps: list[tuple[str, str, tuple[str, ...]]] = [
        (
            "the model, from a package",
            "python -m rollout.models",
            (*demo.model, "--output", str(model)),
        ),
        (
            "1. train: prompts, rollouts, rewards, SQL, a step, weights — all in the ledger",
            "ledger-train",
            (*at, "--hf-checkpoint", str(model), *demo.train),
        ),
        (
            f"2. re-train from version {demo.fork_at} with another advantage estimator",
            "ledger-train",
            (
                *at,
                *("--from-version", str(demo.fork_at), "--advantage-estimator", "rloo"),
                *("--branch", branch, *demo.retrain),
            ),
        ),
        (
            "3. replay: run recorded steps again, compare every bit",
            "ledger-replay",
            (
                "verify",
                *at,
                *demo.verify,
            ),
        ),
        (
            "4. ask: tokens, rewards and versions in SQL",
            "ledger",
            ("sql", *at, "--branch", "main", _QUESTION),
        ),
        ("   the tree of versions", "ledger", ("log", *at)),
        ("5. a picture", "ledger-replay", ("plot", *at, "--output", str(picture))),
    ]
    print(f"\n{demo.title}; everything is written below {output}/")
    for title, command, given in steps:
        code = _run(title, command, given)
        if code:
            return code
    print(
        f"\nall five in {time.monotonic() - began:.0f} s; the rewards of both branches: {picture}"
    )
    return 0


_MODULES = {
    "ledger": "ledger.cli",
    "ledger-train": "trainer.cli",
    "ledger-replay": "replay.cli",
    "python -m rollout.models": "rollout.models.__main__",
}


def _run(title: str, command: str, given: Sequence[str]) -> int:
    """Print one command and run it here: the same function, without the seconds of its imports."""
    print(f"\n── {title}\n$ {command} {shlex.join(given)}", flush=True)
    began = time.monotonic()
    main_of: Callable[[Sequence[str]], int] = importlib.import_module(_MODULES[command]).main
    code = main_of(list(given))
    gc.collect()
    if code:
        print(f"this command failed with exit code {code}", file=sys.stderr)
    else:
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
