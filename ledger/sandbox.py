"""What a query may be: one statement that only reads, of functions that stay in the database.

A statement is judged by DuckDB's own parse of it, never by its spelling: comments, quotes and
schemas do not hide a function. Table functions are refused unless they are known to be harmless, so
that what a later DuckDB adds is refused too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import duckdb

from ledger.errors import InvalidArgument, explain

__all__ = ["forbidden_functions", "refuse_changes", "shortened"]

_READS = frozenset({"SELECT", "EXPLAIN", "MULTI"})
"""Statement types that only read. DESCRIBE, SHOW, SUMMARIZE, VALUES, FROM and PIVOT … IN are
SELECT to DuckDB; PIVOT without IN is MULTI in 2.0 and CREATE (of an enum of its own) in 1.5."""

_HARMLESS = frozenset(
    (
        *("generate_series", "histogram", "histogram_values", "icu_calendar_names", "json_each"),
        *("json_tree", "pg_timezone_names", "range", "repeat", "repeat_row", "summary", "unnest"),
        *("duckdb_columns", "duckdb_constraints", "duckdb_databases", "duckdb_functions"),
        *("duckdb_indexes", "duckdb_keywords", "duckdb_schemas", "duckdb_sequences"),
        *("duckdb_tables", "duckdb_types", "duckdb_views"),
        *("pragma_collations", "pragma_show", "pragma_table_info", "pragma_version"),
    )
)
"""Table functions that compute, or tell of the views. All others read files, run text as SQL, read
memory at an address, or change the process."""

_FILES = frozenset(
    (
        *("glob", "read_blob", "read_text", "read_csv", "read_csv_auto", "sniff_csv"),
        *("read_json", "read_json_auto", "read_json_objects", "read_json_objects_auto"),
        *("read_ndjson", "read_ndjson_auto", "read_ndjson_objects"),
        *("read_parquet", "parquet_scan", "parquet_schema", "parquet_metadata"),
        *("parquet_bloom_probe", "parquet_file_metadata", "parquet_full_metadata"),
        *("parquet_kv_metadata", "parquet_page_index"),
    )
)
"""Table functions that read files: for those who allow it."""

_OTHERS = frozenset(
    (
        *("current_setting", "getenv", "json_execute_serialized_sql", "nextval", "pg_sleep"),
        *("setval", "sleep_ms", "write_log"),
    )
)
"""Other functions that are refused: they tell of the process, write, or only wait."""

_INSTEAD = {
    True: "to read files as well, allow it: --allow-external",
    False: "ask the views: a query reaches nothing of this process",
}
"""What to do where a function is refused, by whether it reads files."""

_table_functions: set[str] = set()
"""All table functions that this DuckDB has; found once in a process."""

_EXPLAIN = re.compile(r"\s*explain\b(\s+analyze\b)?(\s*\([^)]*\))?", re.IGNORECASE)


def forbidden_functions(
    con: duckdb.DuckDBPyConnection, *, allow_external: bool = False
) -> frozenset[str]:
    """Names of the functions of this DuckDB that a query may not use."""
    if not _table_functions:
        _table_functions.update(_find_table_functions(con))
    allowed = _HARMLESS | (_FILES if allow_external else frozenset())
    return frozenset(_table_functions) - allowed | _OTHERS


def _find_table_functions(con: duckdb.DuckDBPyConnection) -> set[str]:
    known = con.execute(
        "SELECT DISTINCT lower(function_name) FROM duckdb_functions() "
        "WHERE function_type IN ('table', 'table_macro', 'pragma')"
    ).fetchall()
    return {name for (name,) in known}


def refuse_changes(con: duckdb.DuckDBPyConnection, sql: str, forbidden: frozenset[str]) -> None:
    """Raise InvalidArgument unless `sql` is one statement that only reads; see the module.

    What does not parse raises DuckDB's own error.
    """
    statements = con.extract_statements(sql)
    kinds = [_kind(statement) for statement in statements]
    if kinds == ["CREATE", "SELECT"] and ";" not in sql.strip().rstrip(";"):
        kinds = ["MULTI"]  # DuckDB 1.5 takes PIVOT apart like this
    if len(kinds) != 1:
        raise _refusal(sql, f"{len(kinds)} statements", "ask one question at a time")
    if kinds[0] not in _READS:
        raise _refusal(sql, f"a statement of type {kinds[0]}")
    asked = sql
    if kinds[0] == "EXPLAIN":
        asked = _EXPLAIN.sub("", sql, count=1)
        kinds = [_kind(s) for s in con.extract_statements(asked)]
        if kinds not in (["SELECT"], ["MULTI"]):
            raise _refusal(sql, "EXPLAIN of a statement that changes something")
    used = _parsed_functions(con, asked) if kinds[0] == "SELECT" else _called_words(asked)
    for name in used:
        if name in forbidden:
            raise _refusal(sql, f"the function {name}", _INSTEAD[name in _FILES])


def shortened(sql: str) -> str:
    """A query for a message: on one line, not too long."""
    text = " ".join(sql.split())
    return text if len(text) <= 200 else text[:200] + " …"


def _kind(statement: Any) -> str:
    return str(statement.type).rpartition(".")[2]


def _parsed_functions(con: duckdb.DuckDBPyConnection, sql: str) -> Iterator[str]:
    """Names of all functions in DuckDB's parse of a SELECT."""
    ((text,),) = con.execute("SELECT json_serialize_sql($1::VARCHAR)", [sql]).fetchall()
    parsed = json.loads(text)
    if parsed["error"]:
        raise _refusal(sql, f"what cannot be looked into: {parsed.get('error_message')}")
    waiting: list[Any] = [parsed]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            name = node.get("function_name")
            if isinstance(name, str):
                yield name.lower()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _called_words(sql: str) -> Iterator[str]:
    """Names before an opening bracket, comments left out; for statements without a parse to see.

    More may be found than is called, never less.
    """
    data = sql.encode()
    starts = [(at, kind) for at, kind in duckdb.tokenize(sql) if kind != duckdb.token_type.comment]
    # A comment hides in the text of the token before it: cut each at the next start of any kind.
    ends = sorted(at for at, _ in duckdb.tokenize(sql))
    words: list[str] = []
    for at, _ in starts:
        end = next((e for e in ends if e > at), len(data))
        words.append(data[at:end].decode(errors="replace").strip().strip('"').lower())
    for word, following in itertools.pairwise(words):
        if following.startswith("("):
            yield word
            # 'f.query' may be one token.
            yield word.rpartition(".")[2].strip('"')


def _refusal(
    sql: str, found: str, do: str = "events are only ever appended, by a writer"
) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "running a query",
            on=shortened(sql),
            expected="one statement that only reads the views: SELECT, WITH, FROM, VALUES, "
            "DESCRIBE, SUMMARIZE, EXPLAIN, SHOW or PIVOT",
            found=found,
            do=do,
        )
    )
