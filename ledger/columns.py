"""Columns of a table as numpy arrays, with the questions that checks ask of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledger.encode import refuse

__all__ = ["Rows"]


class Rows:
    """The rows of one kind. Every check raises InvalidEvent at the first row that fails it."""

    def __init__(self, kind: str, table: pa.Table) -> None:
        self.kind = kind
        self.count: int = table.num_rows
        self._table = table.combine_chunks()

    def refuse(self, row: int, field: str, expected: object, found: object) -> NoReturn:
        """Raise InvalidEvent for a row and field of this kind."""
        refuse(self.kind, row, field, expected, found)

    def has(self, field: str) -> bool:
        """Whether the layout of these rows has the column."""
        return field in self._table.column_names

    def scalars(self, field: str) -> list[Any]:
        """The column as Python values; not for per-token columns."""
        return self._table.column(field).to_pylist()  # type: ignore[no-any-return]

    def numbers(self, field: str, *, null: int | None = None) -> np.ndarray:
        """[rows] int64, with `null` for nulls. Without it the column must have none."""
        column = self._table.column(field)
        if null is not None:
            column = pc.fill_null(column, null)
        return np.asarray(column.to_numpy(), np.int64)

    def lengths(self, field: str) -> np.ndarray:
        """[rows] int64: lengths of a list column; -1 where it is null."""
        lengths = pc.list_value_length(self._table.column(field))
        return np.asarray(pc.fill_null(lengths, -1).to_numpy(), np.int64)

    def flat(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """All values of a column in one array, and [rows + 1] offsets of its rows in it.

        A column of plain numbers has one value a row. The values keep their dtype.
        """
        column = self._table.column(field)
        if not pa.types.is_list(column.type):
            return column.to_numpy(), np.arange(self.count + 1)
        offsets = np.zeros(self.count + 1, np.int64)
        np.cumsum(np.maximum(self.lengths(field), 0), out=offsets[1:])
        return pc.list_flatten(column).to_numpy(), offsets

    def same_length(self, field: str, other: str) -> None:
        """`other` has as many values as `field` in every row, unless it is null."""
        wanted, found = self.lengths(field), self.lengths(other)
        wrong = (wanted != found) & (found >= 0)
        if wrong.any():
            row = int(wrong.argmax())
            self.refuse(row, other, f"{wanted[row]} values, as {field} has", f"{found[row]} values")

    def at_least(self, field: str, low: int) -> None:
        """No value of a column of numbers, or of lists of numbers, lies below `low`."""
        values, offsets = self.flat(field)
        if len(values) and values.min() < low:
            at = int((values < low).argmax())
            row = int(np.searchsorted(offsets, at, "right")) - 1
            position = f" at position {at - offsets[row]}" if len(values) != self.count else ""
            self.refuse(row, field, f"{low} or more", f"{values[at]}{position}")

    def one_of(self, field: str, allowed: Collection[str]) -> None:
        """Every value of a text column is one of `allowed`."""
        column = self._table.column(field)
        for value in pc.unique(column).to_pylist():
            if value not in allowed:
                row = self.scalars(field).index(value)
                self.refuse(row, field, f"one of {sorted(allowed)}", repr(value))

    def unique(self, *fields: str) -> None:
        """No two rows agree in all `fields` (columns of numbers)."""
        keys = np.stack([self.numbers(name) for name in fields], axis=1)
        _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
        if (counts > 1).any():
            row = int(first[(counts > 1).argmax()])
            key = ", ".join(f"{n} {v}" for n, v in zip(fields, keys[row], strict=True))
            self.refuse(row, fields[0], "at most one row each", f"{key} more than once")
