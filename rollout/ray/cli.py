"""`ledger-run`: trainer and rollouts of one run on Ray, as one layout file places them.

It starts `ledger-train` and `ledger-rollout`, each as it could be started alone, and looks after
them: one whose process was ended is started again, and goes on from the ledger. It keeps nothing
itself, so that it may be killed, too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger.errors import InvalidArgument, LedgerError, explain
from rollout.engines.sglang.arguments import sglang_options
from rollout.ray.layout import Layout, explained, read_layout

__all__ = ["main"]

_EXAMPLES = """\
examples:
  ledger-run --layout layout.toml --explain-layout
      what goes where, and what Ray is asked for
  ledger-run --layout layout.toml --ledger runs/a --hf-checkpoint models/tiny --num-rollout 20
      train; the same command again goes on where it was stopped or killed
All other options are those of ledger-train and ledger-rollout, which get what is theirs.
"""
_TRAIN, _ROLLOUT = "ledger-train", "ledger-rollout"
_MODULES = {_TRAIN: "trainer.cli", _ROLLOUT: "rollout.cli"}


def build_parser() -> argparse.ArgumentParser:
    """The parser of this command's own options."""
    parser = argparse.ArgumentParser(
        prog="ledger-run",
        usage="ledger-run --layout FILE [options of ledger-train]",
        allow_abbrev=False,
        description="Train a run on a Ray cluster (RAY_ADDRESS), or on one that it starts on this "
        "host: engines, rollout workers and trainer ranks are actors where the layout places them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", required=True, metavar="FILE", help="what goes where (TOML)")
    parser.add_argument(
        "--explain-layout", action="store_true", help="print what the layout means, and exit"
    )
    parser.add_argument(
        "--max-command-restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often trainer or rollouts are started again after their process, or a rank's, "
        "was ended (default: 3)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0 on success; else what the command that failed ended with."""
    words = list(sys.argv[1:] if argv is None else argv)
    found, passed_on = build_parser().parse_known_args(words)
    try:
        layout = read_layout(found.layout)
        if found.explain_layout:
            print(explained(layout))
            return 0
        results = _run(layout, Path(found.layout), passed_on, found.max_command_restarts)
    except LedgerError as error:
        print(f"ledger-run: {error}", file=sys.stderr)
        return 2
    except _Failed as failed:
        return failed.code
    except KeyboardInterrupt:
        print("ledger-run: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if found.json:
        print(json.dumps(results, sort_keys=True))
    else:
        for name, result in results.items():
            print(f"{name}: {json.dumps(result, sort_keys=True)}")
    return 0


class _Failed(Exception):
    """A command ended, has said why, and is not started again."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _run(
    layout: Layout, path: Path, words: Sequence[str], max_restarts: int
) -> dict[str, dict[str, Any]]:
    from rollout.ray.cluster import GROUP, cluster, reserve

    commands = _commands(path, words)
    with cluster(layout.needed()) as ray:
        given = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        if layout.colocate:
            name = f"ledger-{os.getpid()}"
            strategy = "PACK" if layout.trainer.nodes == 1 else "STRICT_SPREAD"
            reserve(ray, layout.trainer_bundles(), strategy, name=name)
            given[GROUP] = name
        kept = [_Kept(name, line, given, max_restarts) for name, line in commands.items()]
        return _look_after(kept)


def _commands(path: Path, words: Sequence[str]) -> dict[str, list[str]]:
    """The two command lines. Raises InvalidArgument for what cannot be given to both."""
    from rollout.cli import build_parser as rollout_parser
    from trainer.cli import build_parser as trainer_parser

    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    if "--from-version" in given and "--branch" not in given:
        raise InvalidArgument(
            explain(
                "forking a branch",
                on="--from-version",
                expected="--branch NAME beside it, by which the rollouts find the branch",
                found="no --branch",
            )
        )
    if "--rollout-by" in given:
        raise InvalidArgument(
            explain("starting a run", on="--rollout-by", expected="nothing: it is 'elsewhere' here")
        )
    shared = ["--layout", str(path.absolute()), "--json"]
    train = [*words, *shared, "--rollout-by", "elsewhere"]
    parsers = trainer_parser(), rollout_parser()
    own, _ = sglang_options(train, parsers[0]._option_string_actions.keys())
    parsers[0].parse_args(own)  # says what is wrong once, and ends
    # Arguments of SGLang's servers are those of the rollouts, too.
    own, _ = sglang_options(words, parsers[1]._option_string_actions.keys())
    _, not_theirs = parsers[1].parse_known_args(own)
    return {_TRAIN: train, _ROLLOUT: [*_without(words, not_theirs), *shared]}


def _without(words: Sequence[str], left: Sequence[str]) -> list[str]:
    """The words that a parser has taken, in order; `left` are those that it has not."""
    rest, taken = list(left), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            taken.append(word)
    return taken


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass(slots=True, eq=False)
class _Kept:
    """A command that is started again where its process was ended."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    restarts_left: int
    process: subprocess.Popen[str] | None = None
    result: dict[str, Any] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULES[self.name], *self.words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
            preexec_fn=_end_with_parent,
        )
        print(f"ledger-run: {self.name} is process {self.process.pid}", file=sys.stderr)

    def until_done(self, failed: threading.Event) -> int:
        """Wait for it, and start it again where that helps; what it ended with at last."""
        while True:
            self.start()
            if self.process is None:
                raise RuntimeError("a command was not started")
            printed, _ = self.process.communicate()
            code = self.process.returncode
            if code == 0:
                self.result = json.loads(printed.splitlines()[-1])
                return 0
            # Below 0: ended by a signal; from 128 on, a rank was.
            if failed.is_set() or not (code < 0 or code >= 128) or not self.restarts_left:
                return code if code > 0 else 128 - code
            self.restarts_left -= 1
            print(f"ledger-run: {self.name} ended with {code}; it goes on", file=sys.stderr)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _look_after(commands: Sequence[_Kept]) -> dict[str, dict[str, Any]]:
    """Run the commands to their end; where one fails for good the others are ended."""
    failed = threading.Event()
    codes: dict[str, int] = {}

    def keep(one: _Kept) -> None:
        code = one.until_done(failed)
        if code and not failed.is_set():
            failed.set()
            codes[one.name] = code
            for other in commands:
                if other is not one:
                    other.end()

    # PR_SET_PDEATHSIG counts from the thread that starts a process: these live until it has ended.
    threads = [threading.Thread(target=keep, args=(one,), name=one.name) for one in commands]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        failed.set()
        for one in commands:
            one.end()
        raise
    for name, code in codes.items():
        print(f"ledger-run: {name} ended with {code}; the run was stopped", file=sys.stderr)
        raise _Failed(code)
    return {one.name: one.result or {} for one in commands}


if __name__ == "__main__":
    sys.exit(main())
