"""The trainer's step on the CPU against TRL's GRPOTrainer: time and memory, same model and batch.

Each side lives in a process of its own with as many threads; they take steps in turns, so that what
slows the machine down slows all of them. Both get the same prompts, responses and rewards, in
float32; that they take the same step is checked by the norm of its gradient.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.bench.figures import Figure
from tests.bench.samples import emptied
from tests.bench.trainer_case import Case, make_model

__all__ = ["FULL", "QUICK", "trainer_figures"]

GROUP = "training step"
QUICK = Case(
    samples=16,
    n_samples_per_prompt=8,
    prompt_length=16,
    median_response=24,
    longest_response=128,
    micro_batch_size=4,
    max_tokens=256,
    vocab_size=2048,
    hidden_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=352,
    threads=1,
)
FULL = Case(
    samples=16,
    n_samples_per_prompt=8,
    prompt_length=48,
    median_response=64,
    longest_response=512,
    micro_batch_size=4,
    max_tokens=1024,
    vocab_size=16384,
    hidden_size=512,
    layers=4,
    heads=8,
    kv_heads=4,
    intermediate_size=1408,
    threads=os.cpu_count() or 1,
)
_ROOT = Path(__file__).parents[2]
_OURS = ("packed", "packed-flash", "padded")
_LEVEL = dataclasses.replace(FULL, same_length=True, median_response=int(FULL.lengths_B.mean()))
"""The same number of tokens in responses of one length: nobody pads anything."""
_NAMES = {
    "packed": "packed by tokens, as recorded",
    "packed-flash": "packed, attention by torch's kernel",
    "padded": "padded rows, bits of Hugging Face eager",
}


class _Side:
    """A process that takes steps when it is asked to."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(_ROOT))},
            )
        self.log = log
        self.answered()

    def ask(self, word: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answered()

    def answered(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                numbers: dict[str, float] = json.loads(line[len("ANSWER ") :])
                return numbers
        raise RuntimeError(f"{self.process.args} ended:\n{self.log.read_text()[-4000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def trainer_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Tokens per second and memory against TRL's; then the ledger's and the digests' share."""
    if find_spec("trl") is None:
        yield Figure(
            group=GROUP,
            name="against TRL",
            against="TRL's GRPOTrainer",
            ratio=None,
            note="trl is not installed: pip install -e '.[bench]'",
        )
        return
    emptied(folder)
    if quick:
        yield from _figures(QUICK, folder / "long-tailed", "long-tailed", repetitions=1)
        return
    yield from _figures(FULL, folder / "long-tailed", "long-tailed", repetitions=2)
    yield from _figures(_LEVEL, folder / "one-length", "one length", repetitions=2)


def _figures(case: Case, folder: Path, lengths: str, *, repetitions: int) -> Iterator[Figure]:
    parameters = make_model(case, folder / "model")
    taken = _measure(case, folder, repetitions=repetitions)
    trl = taken.pop("trl")
    tailed = lengths == "long-tailed"
    what = (
        f"{parameters / 1e6:.0f}M parameters, {case.samples} samples, {case.tokens:,} tokens, "
        f"{case.threads} threads"
    )
    padded = case.samples * (case.prompt_length + int(case.lengths_B.max()))
    for how, one in taken.items():
        _same_step(how, one["grad_norm"], trl["grad_norm"])
        whole, whole_trl = (side["seconds"] + side["score_s"] for side in (one, trl))
        cpu, cpu_trl = (side["cpu_seconds"] + side["score_cpu_s"] for side in (one, trl))
        yield Figure(
            group=GROUP,
            name=f"{lengths}: {_NAMES[how]}",
            against="TRL's GRPOTrainer, no recording",
            ratio=whole_trl / whole,
            goal=1.2 if how == "packed" and tailed and case is not QUICK else None,
            note=f"{case.tokens / whole:.0f} tokens/s against {case.tokens / whole_trl:.0f}: "
            f"old log-probs {one['score_s']:.2f} s against {trl['score_s']:.2f}, step "
            f"{one['seconds']:.2f} against {trl['seconds']:.2f}; in CPU time {cpu_trl / cpu:.2f}; "
            f"peak {one['peak_bytes'] / 1e9:.2f} GB against {trl['peak_bytes'] / 1e9:.2f}; {what}",
            details={f"ours_{k}": v for k, v in one.items()}
            | {f"trl_{k}": v for k, v in trl.items()}
            | {"tokens": case.tokens, "padded_tokens": padded},
        )
    packed = taken["packed"]
    for name, key, goal in (
        (f"ledger, in the packed step, {lengths}", "ledger_s", 0.01),
        (f"digests, in the packed step, {lengths}", "digest_s", None),
    ):
        yield Figure(
            group=GROUP,
            name=name,
            against="wall time of the step",
            ratio=packed[key] / packed["seconds"],
            goal=None if case is QUICK else goal,
            at_most=True,
            unit="%",
            note=f"{1e3 * packed[key]:.0f} ms of {packed['seconds']:.2f} s, no generation in it"
            + (
                f": four appends {1e3 * packed['append_s']:.0f}, select and load the rest"
                if key == "ledger_s"
                else ""
            ),
        )


def _measure(case: Case, folder: Path, *, repetitions: int) -> dict[str, dict[str, float]]:
    sides: dict[str, _Side] = {}
    told: dict[str, list[dict[str, float]]] = {}
    try:
        for name in ("trl", *_OURS):
            place = emptied(folder / name)
            module = "tests.bench.trainer_trl" if name == "trl" else "tests.bench.trainer_ours"
            arguments = [case.text(), str(folder / "model"), str(place)]
            if name != "trl":
                arguments.append(name)
            sides[name] = _Side(module, *arguments, log=folder / f"{name}.log")
        for _ in range(repetitions + 1):
            for name, side in sides.items():
                step = side.ask("step")
                scored = side.ask("score")
                step |= {"score_s": scored["seconds"], "score_cpu_s": scored["cpu_seconds"]}
                told.setdefault(name, []).append(step)
    finally:
        for side in sides.values():
            side.close()
    # The first step of a process allocates; the gradient is compared there, from the same weights.
    return {
        name: {key: statistics.median(one[key] for one in steps[1:]) for key in steps[0]}
        | {"grad_norm": steps[0]["grad_norm"], "peak_bytes": steps[-1]["peak_bytes"]}
        for name, steps in told.items()
    }


def _same_step(how: str, found: float, expected: float) -> None:
    if abs(found / expected - 1) > 1e-3:
        raise RuntimeError(
            f"the norm of the gradient is {found} ({how}) and {expected} (TRL): not the same step"
        )
