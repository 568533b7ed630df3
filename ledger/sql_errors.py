"""What DuckDB refuses, as errors of ours: what was asked, what it says, and what to do about it."""

from __future__ import annotations

import difflib
import re

import duckdb

from ledger.errors import InvalidArgument, explain
from ledger.sandbox import shortened
from ledger.views import view_names

__all__ = ["translation"]

_NO_TABLE = re.compile(r"Table with name (.+?) does not exist")
_PARAMETERS = re.compile(r"Values were not provided for|Parameter/argument count mismatch")


def translation(sql: str, error: duckdb.Error) -> InvalidArgument:
    """The error of a query that DuckDB did not run, or did not finish."""
    found = str(error).strip()
    no_table = _NO_TABLE.search(found)
    if isinstance(error, duckdb.OutOfMemoryException):
        expected = "a query that fits the memory limit"
        found = found.partition("\n")[0]  # then follow settings that a query cannot have
        do = "raise --memory-limit, or ask for fewer rows or columns"
    elif no_table is not None:
        expected = "one of the views " + ", ".join(view_names())
        found = found.partition("\n")[0]  # then follows the nearest of DuckDB's own tables
        near = difflib.get_close_matches(no_table[1].lower(), view_names(), n=1)
        do = "`ledger views` lists the views and says what each is"
        do = f"did you mean {near[0]}? {do}" if near else do
    elif _PARAMETERS.search(found):
        expected = "a value for each parameter of the query, and for nothing else"
        do = "give it: --param NAME=VALUE for $NAME, --param VALUE for $1 (in Python: params=)"
    elif isinstance(error, duckdb.ParserException):
        expected = "SQL, in DuckDB's dialect"
        do = "docs/queries.md has worked queries"
    else:
        expected = "SQL over the columns of the views"
        do = "`ledger views NAME` describes the columns of a view"
    return InvalidArgument(
        explain("running a query", on=shortened(sql), expected=expected, found=found, do=do)
    )
