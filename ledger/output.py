"""How the command line prints: tables with full values, JSON, files of other formats."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ledger.errors import InvalidArgument, StorageFailed, explain

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

__all__ = [
    "FORMATS",
    "draw_text",
    "plain",
    "print_events",
    "print_json",
    "printable",
    "show",
    "write_table",
]

FORMATS = ("table", "csv", "json", "parquet", "arrow")
_PLAIN_WIDTH = 100_000
"""Columns of output that is no terminal: nothing is wrapped or cut there."""


def show(*drawn: Any) -> None:
    """Print what rich can draw: in colour and the terminal's width, or plainly where it is none."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(*drawn, sep="\n", highlight=False)
        return
    sys.stdout.writelines(line + "\n" for line in _plain_lines(*drawn))


def _plain_lines(*drawn: Any) -> list[str]:
    from rich.console import Console

    made = io.StringIO()
    Console(file=made, width=_PLAIN_WIDTH, no_color=True).print(*drawn, sep="\n", highlight=False)
    return [line.rstrip() for line in made.getvalue().splitlines()]


def draw_text(table: pa.Table) -> str:
    """A table as lines of text, without the number of its rows."""
    return "\n".join(_plain_lines(_drawn(table)))


def printable(text: str) -> str:
    """`text` with control characters shown as escapes: no stored text can drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(value: Any) -> Any:
    """A JSON-ready value. Bytes become hexadecimal; floats that JSON lacks become 'nan', 'inf'."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def print_json(value: Any) -> None:
    """`value` as JSON on standard output."""
    json.dump(plain(value), sys.stdout, ensure_ascii=False, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_events(kind: str, table: pa.Table | None) -> None:
    """Each event as one line of JSON with its kind, as soon as it is there."""
    for row in [] if table is None else table.to_pylist():
        print(json.dumps(plain({"event": kind, **row}), ensure_ascii=False, allow_nan=False))


def write_table(table: pa.Table, format_: str, output: str | Path | None = None) -> None:
    """Write a query's result to standard output, or to a file.

    A file is there wholly or as it was before. Raises InvalidArgument for bytes to a terminal,
    StorageFailed where the file is not written.
    """
    if output is not None:
        _write_file(table, format_, Path(output))
    elif format_ in ("parquet", "arrow"):
        sink = _binary_output(format_)
        sink.write(_encoded(table, format_))
        sink.flush()
    elif format_ == "table":
        from rich.text import Text

        count = Text(f"({table.num_rows} row{'' if table.num_rows == 1 else 's'})", style="dim")
        show(_drawn(table), count)
    else:
        sys.stdout.write(_encoded(table, format_).decode())


def _write_file(table: pa.Table, format_: str, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(_encoded(table, format_))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageFailed(
            explain(
                "a result was not written",
                on=str(path),
                expected="a file that can be made in a folder that is there",
                found=error.strerror or str(error),
                do="name another file with --output",
            )
        ) from error


def _encoded(table: pa.Table, format_: str) -> bytes:
    """The whole result in a format of FORMATS."""
    if format_ == "table":
        return (draw_text(table) + "\n").encode()
    if format_ == "json":
        text = json.dumps(plain(_rows(table)), ensure_ascii=False, indent=2, allow_nan=False)
        return (text + "\n").encode()
    if format_ == "csv":
        return _csv(table).encode()
    table = table.rename_columns(_distinct(table.column_names))
    made = io.BytesIO()
    if format_ == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, made)
    else:
        import pyarrow as pa

        with pa.ipc.new_file(made, table.schema) as writer:
            writer.write_table(table)
    return made.getvalue()


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as dictionaries; a column whose name occurs again gets a number."""
    return list(
        table.rename_columns(_distinct(table.column_names)).to_pylist(maps_as_pydicts="lossy")
    )


def _distinct(names: list[str]) -> list[str]:
    made: list[str] = []
    for name in names:
        candidate, number = name, 0
        while candidate in made:
            number += 1
            candidate = f"{name}_{number}"
        made.append(candidate)
    return made


def _drawn(table: pa.Table) -> Table:
    import pyarrow as pa
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    names = _distinct(table.column_names)
    for name, field in zip(names, table.schema, strict=True):
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        drawn.add_column(
            Text(printable(name)), justify="right" if number else "left", overflow="fold"
        )
    for row in _rows(table):
        drawn.add_row(*(Text(_cell(row[name])) for name in names))
    return drawn


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return repr(value)
    simple = plain(value)
    return printable(simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False))


def _csv(table: pa.Table) -> str:
    """Header and rows; NULL is an empty field, lists are JSON, floats keep their shortest form."""
    names = _distinct(table.column_names)
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(names)
    for row in _rows(table):
        writer.writerow("" if row[name] is None else _field(row[name]) for name in names)
    return made.getvalue()


def _field(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    simple = plain(value)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def _binary_output(format_: str) -> BinaryIO:
    if sys.stdout.isatty():
        raise InvalidArgument(
            explain(
                "writing a result",
                on=f"--format {format_}",
                expected="a file or a pipe",
                found="a terminal",
                do=f"add: --output result.{format_}",
            )
        )
    return sys.stdout.buffer
