"""What a query gave: an Arrow table, and the same as pandas, polars, torch or rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledger.errors import MissingDependency, explain
from ledger.output import draw_text

if TYPE_CHECKING:
    import pandas
    import polars

    from ledger.tensors import Column

__all__ = ["Result"]

_SHOWN_ROWS = 20


class Result:
    """The rows of one query. They are in memory, and stay when the ledger is closed."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def arrow(self) -> pa.Table:
        """As an Arrow table, without a copy."""
        return self._table

    def pandas(self) -> pandas.DataFrame:
        """As a pandas data frame; NULL becomes NaN, None or NaT, as pandas has it.

        Raises MissingDependency where pandas is not installed.
        """
        try:
            import pandas  # noqa: F401 — pyarrow needs it, and says less clearly that it is not there
        except ImportError as error:
            raise _missing("pandas") from error
        return self._table.to_pandas()

    df = pandas

    def polars(self) -> polars.DataFrame:
        """As a polars data frame, without a copy where polars can.

        Raises MissingDependency where polars is not installed.
        """
        try:
            import polars
        except ImportError as error:
            raise _missing("polars") from error
        made = polars.from_arrow(self._table)
        assert isinstance(made, polars.DataFrame)
        return made

    pl = polars

    def torch(self) -> dict[str, Column]:
        """As tensors by column: numbers as [rows]; lists as `Ragged` (values, offsets).

        See `ledger.tensors.tensors_of`, with what it raises.
        """
        from ledger.tensors import tensors_of

        return tensors_of(self._table)

    def rows(self) -> list[dict[str, Any]]:
        """As a list of dictionaries of Python values."""
        return list(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches():
            yield from batch.to_pylist()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._table.column_names)

    def __getitem__(self, column: str) -> pa.ChunkedArray:
        return self._table[column]

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Lets any library that knows Arrow take the result: pa.table(result), pl.DataFrame(…)."""
        return self._table.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        text = draw_text(self._table.slice(0, _SHOWN_ROWS))
        hidden = len(self) - _SHOWN_ROWS
        return text + (f"\n… {hidden} more" if hidden > 0 else "")


def _missing(package: str) -> MissingDependency:
    return MissingDependency(
        explain(f"a result was not given as {package}", do=f"pip install {package}")
    )
