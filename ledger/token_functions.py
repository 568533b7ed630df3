"""The functions of SQL that turn tokens into text: token_text, token_bytes, tokens_text.

They are computed only for rows and columns that a query asks for, a vector at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from ledger.errors import InvalidArgument, explain

if TYPE_CHECKING:
    from ledger.token_text import TokenText

__all__ = ["register_token_functions"]

Find = Callable[[Any], Any]
Failed = Callable[[BaseException], None]


def register_token_functions(
    con: duckdb.DuckDBPyConnection, token_text: TokenText | None, failed: Failed
) -> None:
    """Define them in `con`. Without `token_text` they exist too, and say what is missing.

    What they raise is also given to `failed`: DuckDB passes on its text only.
    """
    text: Find = _missing if token_text is None else token_text.text
    piece: Find = _missing if token_text is None else token_text.piece
    decode: Find = _missing if token_text is None else token_text.decode
    for name, find, given, made, arrow in (
        ("token_text", text, "INTEGER", "VARCHAR", pa.string()),
        ("token_bytes", piece, "INTEGER", "BLOB", pa.binary()),
    ):
        vector = _telling(_each_distinct(find, arrow), failed)
        con.create_function(name, vector, [given], made, type="arrow")
    vector = _telling(_each(decode), failed)
    con.create_function("tokens_text", vector, ["INTEGER[]"], "VARCHAR", type="arrow")


def _telling(vector: Find, failed: Failed) -> Find:
    def told(values: pa.Array) -> pa.Array:
        try:
            return vector(values)
        except BaseException as error:
            failed(error)
            raise

    return told


def _each_distinct(find: Find, made: pa.DataType) -> Find:
    """`find` of every distinct value of a vector."""

    def vector(tokens: pa.Array) -> pa.Array:
        if isinstance(tokens, pa.ChunkedArray):
            tokens = tokens.combine_chunks()
        coded = tokens.dictionary_encode()
        found = pa.array([find(value) for value in coded.dictionary.to_pylist()], made)
        return found.take(coded.indices)

    return vector


def _each(find: Find) -> Find:
    def vector(lists: pa.Array) -> pa.Array:
        rows = lists.to_pylist()
        return pa.array([None if row is None else find(row) for row in rows], pa.string())

    return vector


def _missing(_: Any) -> Any:
    raise InvalidArgument(
        explain(
            "tokens were not turned into text",
            expected="the tokenizer of the run",
            found="none",
            do="give it: --tokenizer PATH (a tokenizer.json, or the folder of the model), in "
            "Python tokenizer=PATH",
        )
    )
