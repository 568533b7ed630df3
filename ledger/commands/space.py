"""Commands about what a ledger takes on disk: compact, retain, gc, du."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import Parents, days, duration, hours, open_from, size, whole
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

    made = commands.add_parser(
        "retain",
        parents=[parents.where, parents.run],
        help="retire old rows of a kind, by a rule",
        description="Rows that the rule does not keep are retired: a chained event says which and "
        "by which rule, and keeps their hashes. Order, chain and digests stay as they are; what "
        "needs the rows (replaying those steps) says clearly that they are gone. The files go with "
        "`ledger gc`.",
    )
    made.add_argument("--kind", required=True, metavar="KIND", help="such as routing_recorded")
    rule = made.add_mutually_exclusive_group(required=True)
    rule.add_argument(
        "--keep-versions", metavar="N", type=whole(1), help="keep those of the newest N versions"
    )
    rule.add_argument(
        "--before-version", metavar="V", type=whole(0), help="retire what is older than version V"
    )
    rule.add_argument(
        "--older-than", metavar="DAYS", type=days, help="retire what was committed earlier"
    )
    made.add_argument(
        "--branch",
        metavar="NAME",
        help="only this branch's own rows, by its own versions (default: all branches; then rows "
        "stay that any branch still keeps)",
    )
    made.add_argument("--dry-run", action="store_true", help="only say what would be retired")
    made.set_defaults(run_command=_retain)

    made = commands.add_parser(
        "gc",
        parents=[parents.where],
        help="remove files that nothing refers to any more",
        description="Removes the old files of compacted and retired segments, files of appends "
        "that were never committed, and what interrupted writes left, once they are older than the "
        "grace period.",
    )
    made.add_argument(
        "--grace",
        metavar="HOURS",
        type=hours,
        default=24.0,
        help="leave what is younger (default: 24); must be longer than any append takes",
    )
    made.add_argument(
        "--checkpoints",
        action="store_true",
        help="also checkpoint folders in the ledger's own that no event names",
    )
    made.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    made.set_defaults(run_command=_gc)

    made = commands.add_parser(
        "du",
        parents=[parents.where, parents.run],
        help="say what the ledger takes on disk, and will take",
        description="Bytes by kind, weight version or run, hot and sealed; bytes per token; what "
        "compaction and retention would save; what the next versions will add.",
    )
    made.add_argument(
        "--by", choices=("kind", "version", "run"), default="kind", help="(default: kind)"
    )
    made.add_argument(
        "--forecast", metavar="N", type=whole(1), help="what the next N weight versions will add"
    )
    made.set_defaults(run_command=_du)


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


def _retain(arguments: argparse.Namespace) -> int:
    from ledger.retention import Rule, apply_retention, plan_retention

    rule = Rule(
        arguments.kind,
        keep_versions=arguments.keep_versions,
        before_version=arguments.before_version,
        older_than_days=arguments.older_than,
        branch=arguments.branch,
    )
    with open_from(arguments, write=not arguments.dry_run) as ledger:
        report = plan_retention(ledger, rule, arguments.run)
        if not arguments.dry_run:
            report = apply_retention(ledger, report)
    return _print(report, arguments)


def _gc(arguments: argparse.Namespace) -> int:
    from ledger.collect import collect, plan_collection
    from ledger.progress import progress_bar

    grace_s = arguments.grace * 3600
    with (
        open_from(arguments, write=not arguments.dry_run) as ledger,
        progress_bar("removing") as progress,
    ):
        report = plan_collection(ledger, grace_s=grace_s, checkpoints=arguments.checkpoints)
        if not arguments.dry_run:
            report = collect(ledger, report, grace_s=grace_s, progress=progress)
    return _print(report, arguments)


def _du(arguments: argparse.Namespace) -> int:
    from ledger.usage import measure_usage

    with open_from(arguments) as ledger:
        usage = measure_usage(ledger, arguments.run, forecast=arguments.forecast)
    if arguments.json:
        print_json(usage.as_json())
        return 0
    for line in usage.lines(arguments.by):
        print(printable(line))
    return 0


def _print(report: Any, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            print(printable(line))
    return 0
