"""`make bench-gpu`: how well a CUDA device is used by the training step, and the time of its parts.

A random Llama, long-tailed responses, packed by tokens; the step of the trainer as it is, digests
and events included. `python -m tests.bench.gpu --help` lists the sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ledger.errors import InvalidArgument, LedgerError, explain
from tests.bench.flops import ModelShape, forward_flops, peak_flops, step_flops
from tests.bench.samples import RUN, new_ledger
from tests.bench.trainer_case import Case, make_model

__all__ = ["main", "measured"]

CASE = Case(
    samples=64,
    n_samples_per_prompt=8,
    prompt_length=256,
    median_response=1024,
    longest_response=4096,
    micro_batch_size=1,
    max_tokens=16384,
    vocab_size=32768,
    hidden_size=2048,
    layers=16,
    heads=16,
    kv_heads=8,
    intermediate_size=8192,
    threads=1,
)


def main() -> int:
    """Measure and print; 2 where there is no CUDA device or its peak is not known."""
    given = _parser().parse_args()
    try:
        case = dataclasses.replace(
            CASE,
            samples=given.samples,
            layers=given.layers,
            hidden_size=given.hidden_size,
            intermediate_size=4 * given.hidden_size,
            heads=given.hidden_size // 128,
            kv_heads=max(1, given.hidden_size // 256),
            max_tokens=given.max_tokens,
        )
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
            found = measured(
                case,
                Path(folder),
                bf16=not given.fp32,
                deterministic=given.deterministic,
                attention_backend=given.attention_backend,
                repetitions=given.repetitions,
                peak_tflops=given.peak_tflops,
            )
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found, sort_keys=True))
        return 0
    for name, value in found.items():
        print(f"{name:28} {value if isinstance(value, str) else format(value, ',.4g')}")
    return 0


def measured(
    case: Case,
    folder: Path,
    *,
    bf16: bool,
    deterministic: bool,
    attention_backend: str,
    repetitions: int,
    peak_tflops: float | None,
) -> dict[str, float | str]:
    """Names with units → numbers: medians over the repetitions, after one that does not count.

    Raises InvalidArgument where there is no CUDA device, or its peak is not known.
    """
    import torch

    if not torch.cuda.is_available():
        raise InvalidArgument(
            explain(
                "measuring the step on a GPU",
                expected="a CUDA device",
                found="none that torch sees",
                do="`make bench` measures the step on the CPU",
            )
        )
    name = torch.cuda.get_device_name()
    peak = peak_flops(name, "bf16" if bf16 else "fp32", peak_tflops)
    parameters = make_model(case, folder / "model")
    score, step, lengths, responses = _prepared(
        case,
        folder,
        bf16=bf16,
        deterministic=deterministic,
        attention_backend=attention_backend,
    )
    taken: dict[str, list[float]] = {"score": [], "step": []}
    for turn in range(repetitions + 1):
        for what, function in (("score", score), ("step", step)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            torch.cuda.synchronize()
            if turn:
                taken[what].append(time.perf_counter() - began)
    seconds = {what: statistics.median(values) for what, values in taken.items()}
    shape = _shape(case)
    forward = forward_flops(shape, lengths, responses)
    whole = step_flops(shape, lengths, responses)
    tokens = sum(lengths)
    return {
        "device": name,
        "numbers": "bf16, float32 main weights" if bf16 else "float32, no TF32",
        "deterministic": str(deterministic),
        "attention": attention_backend,
        "parameters": float(parameters),
        "tokens": float(tokens),
        "peak_tflops": peak / 1e12,
        "step_s": seconds["step"],
        "step_tokens_per_s": tokens / seconds["step"],
        "step_mfu": whole / seconds["step"] / peak,
        "old_log_probs_s": seconds["score"],
        "old_log_probs_mfu": forward / seconds["score"] / peak,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def _prepared(
    case: Case, folder: Path, *, bf16: bool, deterministic: bool, attention_backend: str
) -> tuple[Callable[[], Any], Callable[[], Any], list[int], list[int]]:
    """Scoring and step as functions, and the lengths of sequences and responses."""
    from tests.bench.trainer_ours import rollout_events
    from trainer.parallel import initialize
    from trainer.scoring import score_policy
    from trainer.settings import (
        AlgorithmSettings,
        BatchSettings,
        OptimizerSettings,
        ParallelSettings,
    )
    from trainer.state import create_state
    from trainer.step import run_step
    from trainer.stepping import plan_step

    layout = ParallelSettings(bf16=bf16, attention_backend=attention_backend)
    initialize(layout, seed=0, num_threads=case.threads, deterministic=deterministic)
    optimizer = OptimizerSettings(lr=case.lr, adam_beta2=case.adam_beta2)
    state = create_state(folder / "model", layout, optimizer, seed=0)
    sizes = BatchSettings(
        rollout_batch_size=case.samples // case.n_samples_per_prompt,
        n_samples_per_prompt=case.n_samples_per_prompt,
        global_batch_size=case.samples,
        num_steps_per_rollout=1,
        micro_batch_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=case.max_tokens,
    )
    with new_ledger(folder / "ledger") as (ledger, writer):
        for events in rollout_events(case, 0):
            writer.append(events)
        batch, plan = plan_step(ledger.reader(RUN), np.arange(case.samples), sizes, layout)

    def step() -> None:
        run_step(
            state,
            batch,
            plan,
            AlgorithmSettings(),
            sizes,
            step=0,
            rollout_step=0,
            step_in_rollout=0,
            weight_version_in=0,
            weight_version_out=1,
        )

    lengths = (batch.prompt_lengths_B + batch.response_lengths_B).tolist()
    return (
        lambda: score_policy(state, batch, plan),
        step,
        lengths,
        batch.response_lengths_B.tolist(),
    )


def _shape(case: Case) -> ModelShape:
    return ModelShape(
        hidden_size=case.hidden_size,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.hidden_size // case.heads,
        intermediate_size=case.intermediate_size,
        vocab_size=case.vocab_size,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fp32", action="store_true", help="float32 instead of bf16")
    parser.add_argument(
        "--deterministic", action="store_true", help="deterministic algorithms only"
    )
    parser.add_argument(
        "--attention-backend",
        choices=("auto", "flash"),
        default="flash",
        help="flash: torch's kernel; auto: Megatron's local attention",
    )
    parser.add_argument("--samples", type=int, default=CASE.samples, metavar="N")
    parser.add_argument("--layers", type=int, default=CASE.layers, metavar="N")
    parser.add_argument("--hidden-size", type=int, default=CASE.hidden_size, metavar="N")
    parser.add_argument(
        "--max-tokens", type=int, default=CASE.max_tokens, metavar="N", help="of a micro-batch"
    )
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="what the device can do, dense, where it is not in the table of tests/bench/flops.py",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
