"""What the commands share: common options, opening a ledger from them, exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ledger.errors import InvalidArgument

if TYPE_CHECKING:
    from ledger.reader import Reader
    from ledger.store import Ledger

__all__ = [
    "DEFAULT_LEDGER",
    "FOUND",
    "Parents",
    "moment",
    "open_from",
    "parents",
    "reader_from",
    "seconds",
    "whole",
]

DEFAULT_LEDGER = "ledger-data"
"""Where a ledger is when neither --ledger nor LEDGER_URI says so: where ledger-train puts it."""

_UNITS = {"": 1, "b": 1, "k": 1e3, "kb": 1e3, "m": 1e6, "mb": 1e6, "g": 1e9, "gb": 1e9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}

FOUND = 1
"""Exit code: something was found (`check`, `verify`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parents:
    """Parsers with the options that several commands have."""

    where: argparse.ArgumentParser
    """--ledger, --json"""
    run: argparse.ArgumentParser
    branch: argparse.ArgumentParser
    point: argparse.ArgumentParser
    """--as-of"""

    @property
    def everything(self) -> list[argparse.ArgumentParser]:
        """All of them."""
        return [self.where, self.run, self.branch, self.point]


def parents() -> Parents:
    """Make them."""
    where = argparse.ArgumentParser(add_help=False)
    add_place(where)
    where.add_argument("--json", action="store_true", help="print JSON")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--run", metavar="NAME", help="the run (default: the only one)")
    point = argparse.ArgumentParser(add_help=False)
    point.add_argument(
        "--as-of",
        metavar="WHEN",
        type=moment,
        help="the ledger as it was: after event 42, after version v7 was published, or at a time "
        "such as 2026-11-30T12:00:00Z",
    )
    branch = argparse.ArgumentParser(add_help=False)
    branch.add_argument(
        "--branch", metavar="NAME", help="what this branch sees (default: all branches)"
    )
    return Parents(where, run, branch, point)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add --ledger and --catalog."""
    parser.add_argument(
        "--ledger",
        metavar="URI",
        default=os.environ.get("LEDGER_URI", DEFAULT_LEDGER),
        help="where the ledger is: a folder, file://, or s3://BUCKET/PREFIX "
        f"(default: $LEDGER_URI, else {DEFAULT_LEDGER})",
    )
    add_catalog(parser)


def add_catalog(parser: argparse.ArgumentParser) -> None:
    """Add --catalog."""
    parser.add_argument(
        "--catalog",
        metavar="URL",
        help="the ledger's catalog: postgresql+psycopg://USER@HOST/DATABASE, or sqlite:////FILE on "
        "a local disk (default: $LEDGER_CATALOG, else catalog.sqlite in the ledger's folder)",
    )


def whole(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` on, that 64 bits hold."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value < 2**63:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, at least {low}, found {text!r}"
            )
        return value

    return parse


def size(text: str) -> int:
    """An argparse type: bytes, as '128MB', '1.5GiB' or a plain number."""
    number, unit = text.strip(), ""
    while number and not number[-1].isdigit():
        number, unit = number[:-1], number[-1] + unit
    scale = _UNITS.get(unit.strip().lower())
    try:
        value = float(number) * (scale or 0)
    except ValueError:
        value = 0.0
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a size such as 128MB, found {text!r}")
    return int(value)


def duration(text: str) -> float:
    """An argparse type: seconds from 0 on; also '10m', '6h', '7d'."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    scale = units.get(text[-1:].lower())
    try:
        value = float(text) if scale is None else float(text[:-1]) * scale
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e10:  # NaN too
        raise argparse.ArgumentTypeError(f"expected a time such as 600, 10m or 7d, found {text!r}")
    return value


def hours(text: str) -> float:
    """An argparse type: hours from 0 on, also '7d'."""
    return duration(text if text[-1:].isalpha() else f"{text}h") / 3600


def days(text: str) -> float:
    """An argparse type: days from 0 on, also '36h'."""
    return duration(text if text[-1:].isalpha() else f"{text}d") / 86400


def moment(text: str) -> str:
    """An argparse type: a point in time, see `ledger.moment`."""
    from ledger.moment import parse_moment

    try:
        parse_moment(text)
    except InvalidArgument as error:
        lines = (" ".join(line.split()) for line in str(error).splitlines())
        raise argparse.ArgumentTypeError("; ".join(lines)) from error
    return text


def seconds(text: str) -> float:
    """An argparse type: a time that can be waited for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:  # NaN too
        raise argparse.ArgumentTypeError(f"expected seconds, a number above 0, found {text!r}")
    return value


def open_from(arguments: argparse.Namespace, *, write: bool = False) -> Ledger:
    """The ledger that --ledger and --catalog name; for reading only, unless `write`."""
    from ledger.opening import open_ledger

    return open_ledger(arguments.ledger, catalog=arguments.catalog, read_only=not write)


def reader_from(ledger: Ledger, arguments: argparse.Namespace) -> Reader:
    """A reader of the state that --run, --branch and --as-of name."""
    run = ledger.run(arguments.run)
    branch = getattr(arguments, "branch", None)
    if branch is not None:
        ledger.branch(run.run_id, branch)
    return ledger.reader(run.run_id, branch, as_of=arguments.as_of)
