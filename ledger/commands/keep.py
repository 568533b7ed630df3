"""Commands that tell whether a ledger is sound: verify, head."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import FOUND, Parents, open_from, whole
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
    made.add_argument(
        "--head",
        metavar="SEQ:CHAIN",
        type=_head,
        help="a head of the run that was kept elsewhere, as `ledger head` prints it: the run must "
        "be that, or extend it",
    )
    made.add_argument("--threads", metavar="N", type=whole(1), help="files read at once")
    made.set_defaults(run_command=_verify)

    made = commands.add_parser(
        "head",
        parents=[parents.where, parents.run],
        help="print the head of a run's chain, to be kept elsewhere",
        description="The head covers every event of the run. Kept where nobody who can change the "
        "ledger can change it, it proves later, with `ledger verify --head`, that nothing was.",
    )
    made.set_defaults(run_command=_print_head)


def _head(text: str) -> tuple[int, bytes]:
    """An argparse type: SEQ:CHAIN."""
    seq, _, chain = text.strip().partition(":")
    try:
        number, link = int(seq), bytes.fromhex(chain)
    except ValueError:
        number, link = -1, b""
    if number < 0 or len(link) != 32:
        raise argparse.ArgumentTypeError(
            f"expected SEQ:CHAIN, a number and 64 hexadecimal digits, found {text!r}"
        )
    return number, link


def _print_head(arguments: argparse.Namespace) -> int:
    with open_from(arguments) as ledger:
        run = ledger.run(arguments.run)
    head = f"{run.head_seq}:{run.head_chain.hex()}"
    if arguments.json:
        print_json({"run": run.run_id, "head": head})
    else:
        print(head)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ledger.progress import progress_bar
    from ledger.verify import verify_ledger

    with open_from(arguments) as ledger, progress_bar("verifying") as progress:
        report = verify_ledger(
            ledger,
            arguments.run,
            progress,
            checkpoints=not arguments.no_checkpoints,
            head=arguments.head,
            threads=arguments.threads,
        )
    if arguments.json:
        print_json(report.as_json())
        return 0 if report.ok else FOUND
    for line in report.lines():
        print(printable(line))
    return 0 if report.ok else FOUND
