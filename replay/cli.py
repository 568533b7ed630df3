"""`ledger-replay`: run the past again and compare it; draw what it earned."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ledger.commands.common import add_place, open_from
from ledger.errors import LedgerError
from trainer.launch import RankPlan, RanksNeeded, start_ranks
from trainer.model_roles import FLAGS, FOLDERS
from trainer.processes import (
    ElsewhereFailed,
    claim_failure,
    failure_code,
    is_launched,
    is_writer,
    join_ranks,
    leave_ranks,
    wait_for_others,
)

__all__ = ["main"]

VERIFY_TIMEOUT_MINUTES = 60.0
"""How long a collective waits for a rank that reads a checkpoint."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="ledger-replay", description="Replay recorded training, and compare every bit."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="run recorded steps again and compare bits",
        description="Runs the recorded steps of a branch again from the nearest checkpoint and "
        "compares batch, log-probs, loss, gradients, metrics, weights, optimizer and random state "
        "bit by bit. Names the first difference and exits with 1 when there is one. Where no step "
        "follows the checkpoint, only the checkpoint's files are compared.",
    )
    _common(verify)
    verify.add_argument("--branch", default="main", help="branch to verify (default: main)")
    verify.add_argument(
        "--from-version",
        type=int,
        metavar="N",
        help="start from the state of this version (default: the run's first); the nearest "
        "checkpoint at or before it is taken",
    )
    verify.add_argument(
        "--to-version", type=int, metavar="N", help="last version to reproduce (default: the head)"
    )
    for role, flag in FLAGS.items():
        verify.add_argument(
            flag, metavar="DIR", help=f"where the {role} is now, if its folder has moved"
        )
    plot = commands.add_parser(
        "plot",
        help="draw the rewards of all branches by weight version",
        description="Draws mean rewards by weight version for every branch of a run.",
    )
    _common(plot)
    plot.add_argument(
        "--output",
        default="rewards.png",
        metavar="FILE",
        help="picture to write: .png, .svg or .pdf",
    )
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument(
        "--run", default=None, metavar="NAME", help="name of the run (default: the only one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0 when all is reproduced, 1 when something is not, 2 on an error.

    What several ranks recorded is verified by as many: torchrun's, or else they are started here.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words)
    try:
        if arguments.command == "verify":
            return _verify(arguments)
        return _plot(arguments)
    except RanksNeeded as needed:
        try:
            return start_ranks(needed.plan, "replay.cli", words)
        except LedgerError as error:
            print(f"ledger-replay: {error}", file=sys.stderr)
            return 2
    except LedgerError as error:
        if claim_failure(2):
            print(f"ledger-replay: {error}", file=sys.stderr)
        return 2
    except ElsewhereFailed:
        return failure_code()
    except KeyboardInterrupt:
        if claim_failure(130):
            print("ledger-replay: interrupted", file=sys.stderr)
        return 130
    except Exception:
        if claim_failure(1):
            raise
        return failure_code()


def _verify(arguments: argparse.Namespace) -> int:
    from replay.surroundings import differences, recorded_ranks, recorded_surroundings

    began = time.monotonic()
    join_ranks(VERIFY_TIMEOUT_MINUTES)
    shows = is_writer()
    with open_from(arguments) as ledger:
        run_id = ledger.run(arguments.run).run_id
        ledger.branch(run_id, arguments.branch)
        settings, environment = recorded_surroundings(ledger, run_id, arguments.branch)
        differing = differences(environment)
        for line in differing if shows else ():
            print(f"note: {line}", file=sys.stderr)
        ranks = recorded_ranks(settings)
        if ranks > 1 and not is_launched():
            raise RanksNeeded(RankPlan(1, ranks, "torchrun"))

        from replay.verify import Verdict, verify_branch
        from trainer.parallel import initialize
        from trainer.settings import parallel_settings

        initialize(
            parallel_settings(settings),
            seed=settings["rollout_seed"],
            num_threads=settings["num_threads"],
            deterministic=settings["deterministic_mode"],
        )

        def tell(verdict: Verdict) -> None:
            if shows and not arguments.json:
                print(_line(verdict), flush=True)

        report = verify_branch(
            ledger,
            run_id,
            arguments.branch,
            parallel=parallel_settings(settings),
            seed=settings["rollout_seed"],
            from_version=arguments.from_version,
            to_version=arguments.to_version,
            places={name: getattr(arguments, name) for name in FOLDERS.values()},
            tell=tell,
        )
    wait_for_others("end")
    leave_ranks()
    code = 0 if report.reproduced else 1
    if not shows:
        return code
    seconds = time.monotonic() - began
    if arguments.json:
        print(
            json.dumps(
                {
                    "run_id": report.run_id,
                    "branch": report.branch,
                    "start_version": report.start_version,
                    "reproduced": report.reproduced,
                    "steps": report.steps,
                    "recorded_only": report.recorded_only,
                    "verdicts": [dataclasses.asdict(v) for v in report.verdicts],
                    "environment_differences": differing,
                    "seconds": round(seconds, 3),
                },
                sort_keys=True,
            )
        )
    elif report.reproduced and not report.steps:
        print(
            f"run {report.run_id!r}, branch {report.branch!r}: only the checkpoint of version "
            f"{report.start_version} was compared with its record; no step after it was in scope, "
            f"so none was run again ({seconds:.1f} s)"
        )
    elif report.reproduced:
        print(
            f"run {report.run_id!r}, branch {report.branch!r}: {report.steps} steps from version "
            f"{report.start_version} reproduced bit for bit ({seconds:.1f} s)"
        )
    elif not report.diverged:
        print(
            f"run {report.run_id!r}, branch {report.branch!r}: {report.steps} steps reproduced bit "
            f"for bit; {report.recorded_only} recorded only, as no step can be run again in "
            f"another layout than it was taken in ({seconds:.1f} s)",
            file=sys.stderr,
        )
    else:
        last = report.verdicts[-1]
        made_by = "" if last.step is None else f", step {last.step}"
        print(
            f"run {report.run_id!r}, branch {report.branch!r}: DIVERGED first at version "
            f"{last.weight_version}{made_by}",
            file=sys.stderr,
        )
    return code


def _line(verdict: Any) -> str:
    if verdict.kind == "checkpoint":
        what = f"checkpoint of version {verdict.weight_version:<4}"
    else:
        what = f"step {verdict.step:>4} → version {verdict.weight_version:<4}     "
    if verdict.kind == "recorded only":
        return f"{what} recorded only  {verdict.detail}"
    return f"{what} {'reproduced' if verdict.reproduced else 'DIVERGED'}  {verdict.detail}"


def _plot(arguments: argparse.Namespace) -> int:
    from replay.plot import plot_rewards

    with open_from(arguments) as ledger:
        run_id = ledger.run(arguments.run).run_id
        written = plot_rewards(ledger, run_id, Path(arguments.output))
    if arguments.json:
        print(json.dumps({"run_id": run_id, "picture": str(written)}))
    else:
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
