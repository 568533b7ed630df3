"""Commands for the links beside the data, and for the catalog made from them again."""

from __future__ import annotations

import argparse
from typing import Any

from ledger.commands.common import FOUND, Parents, open_from
from ledger.output import print_json, printable

__all__ = ["add"]


def add(commands: Any, parents: Parents) -> None:
    """Add the commands of this module."""
    made = commands.add_parser(
        "export-links",
        parents=[parents.where, parents.run],
        help="write what the catalog knows of commits beside the data, now",
        description="Links are written in the background while a ledger is open. This writes those "
        "that are missing: after a crash, say, or before a backup.",
    )
    made.add_argument(
        "--all", action="store_true", help="write all of them again: where some were lost"
    )
    made.set_defaults(run_command=_export)

    made = commands.add_parser(
        "rebuild-catalog",
        parents=[parents.where],
        help="make a lost or damaged catalog again from the store alone",
        description="Reads the links and files of every run, checks the chain link by link, and "
        "writes a new catalog. The old one is moved aside. Exits with 1 where something is damaged "
        "and so could not be restored as it was. Stop all writers first.",
    )
    made.add_argument("--dry-run", action="store_true", help="only say what would be restored")
    made.add_argument(
        "--force",
        action="store_true",
        help="replace a catalog that is sound; leave commits out that follow a hole in the links",
    )
    made.set_defaults(run_command=_rebuild)


def _export(arguments: argparse.Namespace) -> int:
    from ledger.exporter import export_links

    with open_from(arguments, write=True) as ledger:
        runs = [ledger.run(arguments.run)] if arguments.run is not None else ledger.runs()
        found = {
            run.run_id: export_links(
                ledger.catalog, ledger.store, ledger.ledger_id, run.run_id, again=arguments.all
            )
            for run in runs
        }
    if arguments.json:
        print_json({"commits": found})
        return 0
    for run_id, commits in found.items():
        print(f"run {run_id!r}: links of {commits} commits written")
    return 0


def _rebuild(arguments: argparse.Namespace) -> int:
    from ledger.place import place_of
    from ledger.progress import progress_bar
    from ledger.rebuild_catalog import rebuild_catalog
    from ledger.storage import open_store

    store = open_store(arguments.ledger)
    try:
        place = place_of(store, arguments.catalog)
        with progress_bar("reading runs") as progress:
            report = rebuild_catalog(
                place, dry_run=arguments.dry_run, force=arguments.force, progress=progress
            )
    finally:
        store.close()
    if arguments.json:
        print_json(report.as_json() | {"dry_run": arguments.dry_run})
        return 0 if report.ok else FOUND
    for line in report.lines():
        print(printable(line))
    print("dry run: nothing was changed" if arguments.dry_run else "the catalog was made again")
    return 0 if report.ok else FOUND
