"""Lengths of samples, read before their tokens: they decide the training order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.views import TableSource
from trainer.batch_rows import distinct_samples, positions_of, select_rows

__all__ = ["read_lengths"]


def read_lengths(
    reader: TableSource, indices: Sequence[int] | npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[B] Tokens of prompt and response of each sample, in the order asked for.

    Only offsets of lists are read, no token. A sample without events has 0: `load_batch` names it.
    Raises InvalidArgument: no sample, or one twice.
    """
    indices_B = distinct_samples(indices)
    lengths_B = np.zeros(len(indices_B), np.int64)
    prompts = reader.table("prompt_issued", ("indices", "tokens"))
    groups = np.asarray(pc.list_value_length(prompts.column("indices")).to_numpy(), np.int64)
    members = pc.list_flatten(prompts.column("indices"))
    prompt_lengths = np.repeat(_list_lengths(prompts), groups)
    wanted = select_rows(members, indices_B)
    np.add.at(
        lengths_B, positions_of(members.to_numpy()[wanted], indices_B), prompt_lengths[wanted]
    )
    for kind in ("segment_generated", "observation_appended"):
        table = reader.table(kind, ("index", "tokens"))
        index = table.column("index")
        wanted = select_rows(index, indices_B)
        np.add.at(
            lengths_B,
            positions_of(index.to_numpy()[wanted], indices_B),
            _list_lengths(table)[wanted],
        )
    return lengths_B


def _list_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    return np.asarray(pc.list_value_length(table.column("tokens")).to_numpy(), np.int64)
