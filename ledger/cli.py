"""The command `ledger`: make a ledger, look at it, ask it, check it.

Exit codes: 0 success; 1 something was found (`check`, `verify`); 2 it could not be done, with the
reason on standard error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ledger.commands import ask, common, keep, place, restore, space
from ledger.errors import LedgerError

__all__ = ["DEFAULT_LEDGER", "build_parser", "main"]

DEFAULT_LEDGER = common.DEFAULT_LEDGER

FAILED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never lets a LedgerError through."""
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse has said why on standard error
        return int(leaving.code or 0)
    try:
        code: int = arguments.run_command(arguments)
        sys.stdout.flush()
        return code
    except LedgerError as error:
        print(f"ledger {arguments.command}: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of a pipe has gone (`ledger log | head`): nobody is left to complain to, and
        # the interpreter must not try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"ledger {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The command line: every command with its options."""
    parser = argparse.ArgumentParser(
        prog="ledger", description="Make a trajectory ledger, look at it, ask it, check it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = common.parents()
    for topic in (place, ask, keep, restore, space):
        topic.add(commands, shared)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
