"""The command `ledger`: make a ledger, look at it, ask it, check it.

Exit codes: 0 success; 1 something was found (`check`, `verify`); 2 it could not be done, with the
reason on standard error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.errors import InvalidArgument, LedgerError, explain
from ledger.output import FORMATS, plain, print_json, printable, show, write_table

if TYPE_CHECKING:
    from ledger.reader import Reader
    from ledger.store import Ledger

__all__ = ["DEFAULT_LEDGER", "main"]

DEFAULT_LEDGER = "ledger-data"
"""Where a ledger is when neither --ledger nor LEDGER_URI says so: where ledger-train puts it."""

FOUND, FAILED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never lets a LedgerError through."""
    parser = _parser()
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


def _whole(low: int) -> Callable[[str], int]:
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


def _seconds(text: str) -> float:
    """An argparse type: a time that can be waited for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:  # NaN too
        raise argparse.ArgumentTypeError(f"expected seconds, a number above 0, found {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ledger", description="Make a trajectory ledger, look at it, ask it, check it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--ledger",
        metavar="URI",
        default=os.environ.get("LEDGER_URI", DEFAULT_LEDGER),
        help=f"folder or file:// URI of the ledger (default: $LEDGER_URI, else {DEFAULT_LEDGER})",
    )
    where.add_argument("--json", action="store_true", help="print JSON")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--run", metavar="NAME", help="the run (default: the only one)")
    point = argparse.ArgumentParser(add_help=False)
    point.add_argument(
        "--as-of", metavar="SEQ", type=_whole(0), help="only events up to this number"
    )
    branch = argparse.ArgumentParser(add_help=False)
    branch.add_argument(
        "--branch", metavar="NAME", help="what this branch sees (default: all branches)"
    )
    everything = [where, run, branch, point]

    made = commands.add_parser("init", parents=[where], help="make a ledger")
    made.add_argument("uri", nargs="?", metavar="URI", help="instead of --ledger")
    made.set_defaults(run_command=_init)

    made = commands.add_parser("runs", parents=[where], help="list runs and branches")
    made.set_defaults(run_command=_runs)

    made = commands.add_parser("log", parents=everything, help="draw the tree of weight versions")
    made.add_argument(
        "--limit", "-n", type=_whole(1), metavar="N", help="only the newest N versions"
    )
    made.add_argument("--ascii", action="store_true", help="draw with ASCII characters")
    made.set_defaults(run_command=_log)

    made = commands.add_parser("show", parents=everything, help="show one trajectory")
    made.add_argument("index", type=_whole(0), metavar="INDEX", help="the sample")
    made.set_defaults(run_command=_show)

    made = commands.add_parser("sql", parents=everything, help="ask in SQL (`ledger views`)")
    made.add_argument("query", nargs="?", metavar="QUERY", help="'-' reads standard input")
    made.add_argument("--file", metavar="PATH", help="read the query from a file")
    made.add_argument("--format", choices=FORMATS, help="of the result (default: table)")
    made.add_argument(
        "--param",
        metavar="[NAME=]VALUE",
        action="append",
        default=[],
        help="value of $NAME, or of $1, $2, … in order; JSON values keep their type",
    )
    made.add_argument("--timeout", metavar="S", type=_seconds, help="seconds the query may take")
    made.add_argument("--memory-limit", metavar="SIZE", help="memory it may use, such as 2GB")
    made.add_argument("--describe", metavar="VIEW", help="what the columns of a view mean")
    made.set_defaults(run_command=_sql)

    made = commands.add_parser("views", parents=[where], help="list views, or describe one")
    made.add_argument("view", nargs="?", metavar="VIEW", help="the view to describe")
    made.set_defaults(run_command=_views)

    made = commands.add_parser(
        "check", parents=[where, run, point], help="check the four invariants, all branches"
    )
    made.add_argument(
        "--limit", type=_whole(0), default=100, metavar="N", help="violations listed of each rule"
    )
    made.add_argument(
        "--invariant",
        choices=("I", "II", "III", "IV", "once"),
        action="append",
        help="only this one; may be repeated (once: no sample is trained twice)",
    )
    made.set_defaults(run_command=_check)

    made = commands.add_parser(
        "verify",
        parents=[where, run],
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

    made = commands.add_parser(
        "digest", parents=[where, run], help="print the chain's head and the content digest"
    )
    made.add_argument("--branch", metavar="NAME", default="main", help="(default: main)")
    made.set_defaults(run_command=_digest)
    return parser


def _open(arguments: argparse.Namespace) -> Ledger:
    from ledger.store import open_ledger

    return open_ledger(arguments.ledger)


def _reader(ledger: Ledger, arguments: argparse.Namespace) -> Reader:
    run = ledger.run(arguments.run)
    branch = getattr(arguments, "branch", None)
    if branch is not None:
        ledger.branch(run.run_id, branch)
    return ledger.reader(run.run_id, branch, as_of=arguments.as_of)


def _init(arguments: argparse.Namespace) -> int:
    from ledger.store import open_ledger

    with open_ledger(arguments.uri or arguments.ledger, create=True) as ledger:
        if arguments.json:
            print_json({"uri": ledger.uri, "runs": len(ledger.runs())})
        else:
            print(f"ledger at {ledger.uri}")
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from ledger.overview import draw_runs, read_runs

    with _open(arguments) as ledger:
        runs = read_runs(ledger)
    if arguments.json:
        print_json(runs)
    else:
        show(draw_runs(runs))
    return 0


def _log(arguments: argparse.Namespace) -> int:
    from ledger.tree import draw_log, read_log

    with _open(arguments) as ledger:
        entries = read_log(_reader(ledger, arguments))
    if arguments.limit is not None:
        entries = entries[: arguments.limit]
    if arguments.json:
        print_json([entry.as_json() for entry in entries])
        return 0
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    ascii_only = arguments.ascii or not encoding.startswith("utf")
    if entries:
        show(*draw_log(entries, ascii_only=ascii_only))
    else:
        print("no weight version has been published")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ledger.show import draw_trajectory, read_trajectory

    with _open(arguments) as ledger:
        found = read_trajectory(_reader(ledger, arguments), arguments.index)
    if arguments.json:
        print_json(found)
    else:
        show(draw_trajectory(found))
    return 0


def _sql(arguments: argparse.Namespace) -> int:
    from ledger.sql import run_query

    if arguments.describe is not None:
        arguments.view = arguments.describe
        return _views(arguments)
    if arguments.json and arguments.format not in (None, "json"):
        raise _usage("--json or --format", "one of them", f"--json --format {arguments.format}")
    query = _query_text(arguments)
    with _open(arguments) as ledger:
        result = run_query(
            _reader(ledger, arguments),
            query,
            _parameters(arguments.param),
            timeout_s=arguments.timeout,
            memory_limit=arguments.memory_limit,
        )
        write_table(result, "json" if arguments.json else arguments.format or "table")
    return 0


def _query_text(arguments: argparse.Namespace) -> str:
    if (arguments.query is None) == (arguments.file is None):
        raise _usage(
            "the query", "a query, '-' for standard input, or --file PATH", "none, or several"
        )
    if arguments.query == "-":
        return sys.stdin.read()
    if arguments.query is not None:
        return str(arguments.query)
    try:
        return Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _usage("--file", "a file with a query in UTF-8", str(error)) from error


def _parameters(given: Sequence[str]) -> list[Any] | dict[str, Any] | None:
    """`NAME=VALUE` becomes a named parameter, anything else a numbered one; never both."""
    import json

    def value_of(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    named = {name: value_of(v) for name, _, v in (p.partition("=") for p in given) if v}
    if named and len(named) != len(given):
        raise _usage("--param", "all with a name, or none", ", ".join(given))
    return named or [value_of(text) for text in given] or None


def _usage(on: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain("reading the command line", on=on, expected=expected, found=found)
    )


def _views(arguments: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from ledger.views import describe_view, view_names

    if arguments.view is None:
        rows = [(name, describe_view(name)[0]) for name in view_names()]
        heading = ""
    else:
        heading, columns = describe_view(arguments.view)
        rows = [(column.name, column.doc) for column in columns]
    if arguments.json:
        print_json({"doc": heading, "columns": dict(rows)} if heading else dict(rows))
        return 0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, doc in rows:
        table.add_row(name, escape(" ".join(doc.split())))
    show(*([heading] if heading else []), table)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ledger.check import INVARIANTS, check_ledger

    with _open(arguments) as ledger:
        report = check_ledger(
            _reader(ledger, arguments),
            invariants=arguments.invariant or INVARIANTS,
            limit=arguments.limit,
        )
    if arguments.json:
        print_json(report.as_json())
        return 0 if report.ok else FOUND
    for finding in report.findings:
        sample = "" if finding.index is None else f", sample {finding.index}"
        place = f"{finding.kind} seq {finding.seq} on {finding.branch}{sample}"
        print(f"invariant {finding.invariant}: {place}: {printable(finding.what)}")
    print(f"{report.rules} rules, {report.violations} violations")
    return 0 if report.ok else FOUND


def _verify(arguments: argparse.Namespace) -> int:
    from ledger.progress import progress_bar
    from ledger.verify import verify_ledger

    with _open(arguments) as ledger, progress_bar("verifying") as progress:
        report = verify_ledger(
            ledger, arguments.run, progress, checkpoints=not arguments.no_checkpoints
        )
    if arguments.json:
        print_json(report.as_json())
        return 0 if report.ok else FOUND
    for line in report.lines():
        print(printable(line))
    return 0 if report.ok else FOUND


def _digest(arguments: argparse.Namespace) -> int:
    with _open(arguments) as ledger:
        run = ledger.run(arguments.run)
        ledger.branch(run.run_id, arguments.branch)
        found = {
            "run": run.run_id,
            "branch": arguments.branch,
            "head_seq": run.head_seq,
            "chain": run.head_chain,
            "content": ledger.content_digest(run.run_id, arguments.branch),
        }
    if arguments.json:
        print_json(found)
    else:
        for name, value in plain(found).items():
            print(f"{name:<9} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
