"""Commands about the place itself: init, runs, migrate."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import migrations
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

    made = commands.add_parser(
        "migrate",
        parents=[parents.where],
        help="raise the catalog to this version, or take it back",
        description="Changes the catalog's tables in one transaction. An SQLite catalog is copied "
        "first (catalog.sqlite.before-REVISION, beside it). Stop other processes that have the "
        "ledger open.",
    )
    made.add_argument(
        "--to",
        metavar="REVISION",
        default=migrations.HEAD,
        help=f"one of {', '.join(migrations.REVISIONS)} (default: {migrations.HEAD})",
    )
    made.add_argument("--dry-run", action="store_true", help="do it, and undo it")
    made.set_defaults(run_command=_migrate)


def _migrate(arguments: argparse.Namespace) -> int:
    from ledger.migrate import migrate_catalog
    from ledger.place import place_of
    from ledger.progress import progress_bar
    from ledger.storage import open_store

    store = open_store(arguments.ledger)
    try:
        place = place_of(store, arguments.catalog)
        with progress_bar("reading events") as progress:
            done = migrate_catalog(
                place, to=arguments.to, dry_run=arguments.dry_run, progress=progress
            )
    finally:
        store.close()
    if arguments.json:
        print_json(dataclasses.asdict(done) | {"backup": done.backup and str(done.backup)})
        return 0
    if done.before == done.after:
        print(f"{done.catalog} is at {done.after} already")
        return 0
    would = "would go" if done.dry_run else "went"
    print(f"{done.catalog} {would} from {done.before} to {done.after}")
    if done.backup is not None:
        print(f"as it was before: {done.backup}")
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from ledger.opening import open_ledger

    uri = arguments.ledger if arguments.uri is None else arguments.uri
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
