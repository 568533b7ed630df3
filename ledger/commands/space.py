"""Commands about what a ledger takes on disk: compact, retain, gc, du."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import Parents, duration, open_from, size
from ledger.output import print_json, printable

__all__ = ["add"]


def add(commands: Any, parents: Parents) -> None:
    """Add the commands of this module."""
    made = commands.add_parser(
        "compact",
        parents=[parents.where, parents.run],
        help="put hot segments together into Parquet files",
        description="Hot segments of a kind become Parquet files that any reader opens. Nothing "
        "changes for readers of the ledger, writers go on writing, and the hot files stay until "
        "`ledger gc`. Can be interrupted at any point and repeated.",
    )
    made.add_argument("--kind", action="append", metavar="KIND", help="only these; may be repeated")
    made.add_argument(
        "--keep-hot",
        metavar="TIME",
        type=duration,
        default=0.0,
        help="leave what was committed in the last seconds, or 10m, 6h, 7d (default: 0)",
    )
    made.add_argument(
        "--target-size",
        metavar="SIZE",
        type=size,
        default=128 << 20,
        help="size of a file, such as 128MB (the default, binary)",
    )
    made.add_argument("--dry-run", action="store_true", help="only say what would be compacted")
    made.set_defaults(run_command=_compact)


def _compact(arguments: argparse.Namespace) -> int:
    from ledger.compact import compact, plan_compaction
    from ledger.progress import progress_bar

    with (
        open_from(arguments, write=not arguments.dry_run) as ledger,
        progress_bar("compacting") as progress,
    ):
        batches = plan_compaction(
            ledger,
            arguments.run,
            arguments.kind,
            keep_hot_s=arguments.keep_hot,
            target_bytes=arguments.target_size,
        )
        report = compact(
            ledger,
            batches,
            target_bytes=arguments.target_size,
            dry_run=arguments.dry_run,
            progress=progress,
        )
    return _print(report, arguments)


def _print(report: Any, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            print(printable(line))
    return 0
