"""`python -m rollout.models tiny|smollm2 --output DIR`: make a demo model."""

from __future__ import annotations

import argparse
import json
import sys
import time

from ledger.errors import LedgerError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Make the model and print its folder. 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m rollout.models", description=main.__doc__)
    parser.add_argument("model", choices=("tiny", "smollm2"))
    parser.add_argument("--output", required=True, help="the folder to make")
    parser.add_argument("--moe", action="store_true", help="tiny: Qwen3-MoE instead of dense")
    parser.add_argument("--task", default="reasoning_gym:spell_backward", help="tiny: warm-up task")
    parser.add_argument(
        "--task-options", default="{}", metavar="JSON", help="tiny: options of the warm-up task"
    )
    parser.add_argument("--seed", type=int, default=0, help="tiny: seed of weights and warm-up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    began = time.perf_counter()

    def progress(done: int, total: int, what: object) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else "\r"
            print(f"{done}/{total} {what!s:60.60}", end=end, file=sys.stderr, flush=True)

    try:
        if args.model == "tiny":
            from rollout.models.tiny import make_tiny_model

            made = make_tiny_model(
                args.output,
                moe=args.moe,
                task=args.task,
                seed=args.seed,
                progress=progress,
                task_options=args.task_options,
            )
        else:
            from rollout.models.smollm2 import make_smollm2

            made = make_smollm2(args.output, progress=progress)
    except LedgerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    took_s = time.perf_counter() - began
    if args.json:
        print(json.dumps({"model": args.model, "directory": str(made), "time_s": took_s}))
    else:
        print(f"{made} ({took_s:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
