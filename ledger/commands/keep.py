"""Commands that keep a ledger sound: verify."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import FOUND, Parents, open_from
from ledger.output import print_json, printable

__all__ = ["add"]


def add(commands: Any, parents: Parents) -> None:
    """Add the commands of this module."""
    made = commands.add_parser(
        "verify",
        parents=[parents.where, parents.run],
        help="check catalog, files, hashes, chain and checkpoints",
        description="Reads everything again: the catalog as a database and against the events, "
        "every segment against its hashes and the chain, every file of every checkpoint against "
        "its size and hash. Lists all that differs and exits with 1 when something does.",
    )
    made.add_argument(
        "--no-checkpoints",
        action="store_true",
        help="leave out the files of checkpoints (they may be large, or kept elsewhere)",
    )
    made.set_defaults(run_command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from ledger.progress import progress_bar
    from ledger.verify import verify_ledger

    with open_from(arguments) as ledger, progress_bar("verifying") as progress:
        report = verify_ledger(
            ledger, arguments.run, progress, checkpoints=not arguments.no_checkpoints
        )
    if arguments.json:
        print_json(report.as_json())
        return 0 if report.ok else FOUND
    for line in report.lines():
        print(printable(line))
    return 0 if report.ok else FOUND
