"""Commands that ask: log, show, sql, follow, views, check, digest."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.commands.common import FOUND, Parents, open_from, reader_from, seconds, whole
from ledger.errors import InvalidArgument, explain
from ledger.output import (
    FORMATS,
    plain,
    print_events,
    print_json,
    printable,
    show,
    write_table,
)

if TYPE_CHECKING:
    from ledger.reader import Reader
    from ledger.token_text import TokenText

__all__ = ["add"]

_NAMED = re.compile(r"([A-Za-z_]\w*)(:?)=(.*)", re.DOTALL | re.ASCII)


def add(commands: Any, parents: Parents) -> None:
    """Add the commands of this module."""
    made = commands.add_parser(
        "log", parents=parents.everything, help="draw the tree of weight versions"
    )
    made.add_argument(
        "--limit", "-n", type=whole(1), metavar="N", help="only the newest N versions"
    )
    made.add_argument("--ascii", action="store_true", help="draw with ASCII characters")
    made.set_defaults(run_command=_log)

    made = commands.add_parser("show", parents=parents.everything, help="show one trajectory")
    made.add_argument("index", type=whole(0), metavar="INDEX", help="the sample")
    _add_tokenizer(made)
    made.set_defaults(run_command=_show)

    made = commands.add_parser(
        "sql", parents=parents.everything, help="ask in SQL (`ledger views`)"
    )
    made.add_argument("query", nargs="?", metavar="QUERY", help="'-' reads standard input")
    made.add_argument("--file", metavar="PATH", help="read the query from a file")
    made.add_argument("--format", choices=FORMATS, help="of the result (default: table)")
    made.add_argument(
        "--param",
        metavar="[NAME=]VALUE",
        action="append",
        default=[],
        help="value of $NAME, or of $1, $2, … in order. 12, 1.5, true, null and JSON lists keep "
        "their type, other words are text; NAME:=VALUE must be JSON, NAME=… may be",
    )
    made.add_argument("--timeout", metavar="S", type=seconds, help="seconds the query may take")
    made.add_argument("--memory-limit", metavar="SIZE", help="memory it may use, such as 2GB")
    made.add_argument("--output", "-o", metavar="FILE", help="write there instead of printing")
    _add_tokenizer(made)
    made.add_argument(
        "--allow-external",
        action="store_true",
        help="let the query read files, too: whatever this process can read; it still changes "
        "nothing and reaches no network",
    )
    made.add_argument("--describe", metavar="VIEW", help="what the columns of a view mean")
    made.set_defaults(run_command=_sql)

    made = commands.add_parser(
        "follow",
        parents=[parents.where, parents.run, parents.branch],
        help="print events as they come, in order",
        description="Prints one line for each row of events of one kind, or with --json one line "
        "of JSON for each event: first those there after --since, then those to come, each once.",
    )
    made.add_argument(
        "--since",
        type=whole(0),
        metavar="SEQ",
        help="begin after this event (default: the newest; 0: with the first)",
    )
    made.add_argument("--kind", action="append", metavar="KIND", help="only these; may be repeated")
    made.add_argument("--once", action="store_true", help="end with what is there now")
    made.add_argument(
        "--poll", type=seconds, default=0.5, metavar="S", help="look this often (default: 0.5)"
    )
    made.set_defaults(run_command=_follow)

    made = commands.add_parser("views", parents=[parents.where], help="list views, or describe one")
    made.add_argument("view", nargs="?", metavar="VIEW", help="the view to describe")
    made.set_defaults(run_command=_views)

    made = commands.add_parser(
        "check",
        parents=[parents.where, parents.run, parents.point],
        help="check the four invariants, all branches",
    )
    made.add_argument(
        "--limit", type=whole(0), default=100, metavar="N", help="violations listed of each rule"
    )
    made.add_argument(
        "--invariant",
        choices=("I", "II", "III", "IV", "once"),
        action="append",
        help="only this one; may be repeated (once: no sample is trained twice)",
    )
    made.set_defaults(run_command=_check)

    made = commands.add_parser(
        "digest",
        parents=[parents.where, parents.run],
        help="print the chain's head and the content digest",
    )
    made.add_argument("--branch", metavar="NAME", default="main", help="(default: main)")
    made.set_defaults(run_command=_digest)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json of the run, or the folder of its model: gives tokens their text",
    )


def _log(arguments: argparse.Namespace) -> int:
    from ledger.gaps import gap_line, read_gaps
    from ledger.tree import draw_log, read_log

    with open_from(arguments) as ledger:
        reader = reader_from(ledger, arguments)
        entries, gaps = read_log(reader), read_gaps(reader)
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
    for gap in gaps:
        print(printable(gap_line(gap)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ledger.show import draw_trajectory, read_trajectory

    with open_from(arguments) as ledger:
        reader = reader_from(ledger, arguments)
        found = read_trajectory(reader, arguments.index, _token_text(arguments, reader))
    if arguments.json:
        print_json(found)
    else:
        show(draw_trajectory(found))
    return 0


def _sql(arguments: argparse.Namespace) -> int:
    from ledger.sql import run_query

    if arguments.describe is not None:
        if arguments.query is not None or arguments.file is not None:
            raise _usage("--describe VIEW", "no query beside it", "a query")
        arguments.view = arguments.describe
        return _views(arguments)
    if arguments.json and arguments.format not in (None, "json"):
        raise _usage("--json or --format", "one of them", f"--json --format {arguments.format}")
    query = _query_text(arguments)
    with open_from(arguments) as ledger:
        reader = reader_from(ledger, arguments)
        result = run_query(
            reader,
            query,
            _parameters(arguments.param),
            timeout_s=arguments.timeout,
            memory_limit=arguments.memory_limit,
            allow_external=arguments.allow_external,
            token_text=_token_text(arguments, reader),
        )
    write_table(result, _format(arguments), arguments.output)
    return 0


def _format(arguments: argparse.Namespace) -> str:
    """--format; else what the name of the output ends with; else a table."""
    if arguments.json:
        return "json"
    if arguments.format is None and arguments.output is not None:
        ending = Path(arguments.output).suffix.lstrip(".").lower()
        if ending in ("", "txt"):
            return "table"
        if ending in FORMATS:
            return ending
        raise InvalidArgument(
            explain(
                "the format of the result is not clear",
                on=f"--output {arguments.output}",
                expected=f"a name that ends with .txt or one of {', '.join(FORMATS)}; or --format",
                found=f".{ending}",
            )
        )
    return arguments.format or "table"


def _token_text(arguments: argparse.Namespace, reader: Reader) -> TokenText | None:
    from ledger.token_text import load_token_text, other_tokenizer

    if arguments.tokenizer is None:
        return None
    found = load_token_text(arguments.tokenizer)
    other = other_tokenizer(reader, found)
    if other is not None:
        print(f"ledger {arguments.command}: {other}", file=sys.stderr)
    return found


def _follow(arguments: argparse.Namespace) -> int:
    from ledger.follow import events_after, follow

    with open_from(arguments) as ledger:
        run = ledger.run(arguments.run)
        since = run.head_seq if arguments.since is None else arguments.since
        kinds, branch = arguments.kind, arguments.branch
        if arguments.once:
            news = events_after(ledger, run.run_id, since, kinds=kinds, branch=branch)
        else:
            news = follow(
                ledger, run.run_id, since, kinds=kinds, branch=branch, poll_s=arguments.poll
            )
        for events in news:
            if arguments.json:
                print_events(events.kind, events.table)
            else:
                kept = "" if events.table is not None else "  (no longer kept)"
                count = events.last_seq - events.first_seq + 1
                print(
                    f"{events.first_seq:>8} {events.last_seq:>8}  {events.branch:<12} "
                    f"{events.kind:<20} {count}{kept}"
                )
            sys.stdout.flush()
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
    """`NAME=VALUE` and `NAME:=JSON` become named parameters, others numbered ones; never both."""
    named: dict[str, Any] = {}
    for text in given:
        found = _NAMED.fullmatch(text)
        if found is None:
            continue
        name, strict, value = found.groups()
        if name in named:
            raise _usage("--param", "each name once", text)
        named[name] = _value(value, text if strict else None)
    if named and len(named) != len(given):
        raise _usage("--param", "all with a name, or none", ", ".join(given))
    return named or [_value(text, None) for text in given] or None


def _value(text: str, strict: str | None) -> Any:
    """JSON as what it says, anything else as text; with `strict` (the whole word) only JSON."""
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if strict is not None:
            raise _usage("--param", "NAME:=JSON", f"{strict} ({error})") from error
        return text


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
    from ledger.gaps import gap_line, read_gaps

    with open_from(arguments) as ledger:
        reader = reader_from(ledger, arguments)
        report = check_ledger(
            reader, invariants=arguments.invariant or INVARIANTS, limit=arguments.limit
        )
        gaps = read_gaps(reader)
    if arguments.json:
        print_json(report.as_json() | {"gaps": gaps})
        return 0 if report.ok else FOUND
    for gap in gaps:  # what is missing breaks no invariant of what is there
        print(printable(gap_line(gap)))
    for finding in report.findings:
        sample = "" if finding.index is None else f", sample {finding.index}"
        place = f"{finding.kind} seq {finding.seq} on {finding.branch}{sample}"
        print(f"invariant {finding.invariant}: {place}: {printable(finding.what)}")
    print(f"{report.rules} rules, {report.violations} violations")
    if report.unchecked:
        print(
            f"{report.unchecked} times a sample could not be checked: retention has retired the "
            "rows for it"
        )
    return 0 if report.ok else FOUND


def _digest(arguments: argparse.Namespace) -> int:
    with open_from(arguments) as ledger:
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
