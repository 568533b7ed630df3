"""Commands about the place itself: init, runs."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import Parents, open_from
from ledger.output import print_json, show

__all__ = ["add"]


def add(commands: Any, parents: Parents) -> None:
    """Add the commands of this module."""
    made = commands.add_parser("init", parents=[parents.where], help="make a ledger")
    made.add_argument("uri", nargs="?", metavar="URI", help="instead of --ledger")
    made.set_defaults(run_command=_init)

    made = commands.add_parser("runs", parents=[parents.where], help="list runs and branches")
    made.set_defaults(run_command=_runs)


def _init(arguments: argparse.Namespace) -> int:
    from ledger.opening import open_ledger

    uri = arguments.uri or arguments.ledger
    with open_ledger(uri, create=True, catalog=arguments.catalog) as ledger:
        if arguments.json:
            print_json({"uri": ledger.uri, "runs": len(ledger.runs())})
        else:
            print(f"ledger at {ledger.uri}")
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from ledger.overview import draw_runs, read_runs

    with open_from(arguments) as ledger:
        runs = read_runs(ledger)
    if arguments.json:
        print_json(runs)
    else:
        show(draw_runs(runs))
    return 0
