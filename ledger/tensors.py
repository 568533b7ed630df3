"""Results as torch tensors: packed, as kernels for sequences of several lengths take them.

This is the one module of the ledger that imports torch, and only when tensors are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidArgument, MissingDependency, explain

if TYPE_CHECKING:
    import torch

__all__ = ["Ragged", "tensors_of"]


class Ragged(NamedTuple):
    """Lists of several lengths, one after the other: row i is values[offsets[i]:offsets[i + 1]].

    `offsets` are what kernels call cu_seqlens;
    `torch.nested.nested_tensor_from_jagged(values, offsets)` takes both without a copy.
    """

    values: torch.Tensor
    """[sum of lengths]"""
    offsets: torch.Tensor
    """[rows + 1] int64, from 0."""

    @property
    def lengths(self) -> torch.Tensor:
        """[rows] int64."""
        return self.offsets.diff()

    def row(self, number: int) -> torch.Tensor:
        """[length] One row, a view."""
        return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def padded(self, fill: float = 0) -> torch.Tensor:
        """[rows, longest] Rows from the left, filled up with `fill`. A copy."""
        lengths = self.lengths
        longest = int(lengths.max()) if len(lengths) else 0
        made = self.values.new_full((len(lengths), longest), fill)
        row = self.offsets.new_tensor(range(longest))[None, :] < lengths[:, None]
        made[row] = self.values
        return made


if TYPE_CHECKING:
    Column = torch.Tensor | Ragged


def tensors_of(table: pa.Table) -> dict[str, Column]:
    """Every column as a tensor [rows], or as `Ragged` where it holds lists of numbers.

    Integers, floats and truth values keep their width; a timestamp becomes int64 in its unit.
    Memory is shared with the table where it is one piece without NULL. A NULL among floats becomes
    NaN, the one value that torch has for it (Arrow tells the two apart). An empty list and a NULL
    list have no values alike.

    Raises:
        InvalidArgument: text, bytes, records or lists of lists, and NULL among integers: torch has
            no value for them.
        MissingDependency: torch is not installed.
    """
    try:
        import torch
        from torch.utils.dlpack import from_dlpack
    except ImportError as error:
        raise MissingDependency(
            explain("a result was not given as tensors", do="pip install torch")
        ) from error

    def tensor(values: pa.Array, name: str) -> Any:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.int64())
        is_float, is_bool = pa.types.is_floating(values.type), pa.types.is_boolean(values.type)
        if not (is_float or is_bool or pa.types.is_integer(values.type)):
            _refuse(name, f"{values.type}", "leave the column out of the SELECT, or code it")
        if values.null_count:
            if not is_float:
                _refuse(name, f"{values.null_count} NULL", f"say what it is: coalesce({name}, …)")
            values = pc.fill_null(values, np.nan)
        if is_bool:
            return from_dlpack(values.cast(pa.uint8())).view(torch.bool)
        return from_dlpack(values)

    made: dict[str, Column] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in made:
            _refuse(name, "two columns of one name", "name them apart: AS")
        # One piece is taken as it is; combine_chunks would copy it.
        whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
            lengths = pc.fill_null(whole.value_lengths(), 0).to_numpy(zero_copy_only=False)
            offsets = np.zeros(len(whole) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            # flatten leaves out what hides behind NULL and outside of a slice.
            made[name] = Ragged(tensor(whole.flatten(), name), torch.from_numpy(offsets))
        else:
            made[name] = tensor(whole, name)
    return made


def _refuse(name: str, found: str, do: str) -> NoReturn:
    raise InvalidArgument(
        explain(
            "a result was not given as tensors",
            on=f"column {name!r}",
            expected="numbers, truth values, times, or lists of them",
            found=found,
            do=do,
        )
    )
