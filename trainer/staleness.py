"""--max-weight-staleness, held against the tokens of a batch before it is trained on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidArgument, explain
from ledger.events import UNKNOWN_VERSION
from ledger.numbering import VERSION_SPAN, local_number
from ledger.reader import Reader

__all__ = ["require_fresh"]


def require_fresh(
    reader: Reader, indices_B: npt.NDArray[np.int64], *, consumer_version: int, bound: int
) -> None:
    """Look at every token of the samples, whatever was said when they were decided.

    Versions are counted by their numbers on the branch, from the one that sampled a token to
    `consumer_version`, the one before the first step that trains on it. Raises InvalidArgument for
    a sample with a token that is older than `bound`, or of a version that no engine said.
    """
    table = reader.table(
        "segment_generated",
        ["index", "span_starts", "span_ends", "span_versions"],
        where={"index": (int(indices_B.min()), int(indices_B.max()))},
    )
    table = table.filter(pc.is_in(table["index"], pa.array(indices_B)))
    owner_S = table["index"].to_numpy()[pc.list_parent_indices(table["span_versions"]).to_numpy()]
    version_S, start_S, end_S = (
        pc.list_flatten(table[name]).to_numpy()
        for name in ("span_versions", "span_starts", "span_ends")
    )
    local_S = np.where(version_S == UNKNOWN_VERSION, -1, version_S % VERSION_SPAN)
    age_S = local_number(consumer_version, VERSION_SPAN) - local_S
    wrong_S = (end_S > start_S) & ((age_S > bound) | (version_S == UNKNOWN_VERSION))
    if not wrong_S.any():
        return
    at = int(np.argmax(np.where(wrong_S, age_S, -1)))
    unknown = version_S[at] == UNKNOWN_VERSION
    raise InvalidArgument(
        explain(
            "training on a batch",
            on=f"sample {owner_S[at]}",
            expected=f"tokens at most {bound} versions older than {consumer_version} "
            "(--max-weight-staleness)",
            found="tokens of a version that the engine did not say"
            if unknown
            else f"tokens of version {version_S[at]}, {age_S[at]} versions older",
            do='nothing was trained; see how it was decided: ledger sql "select * from decisions '
            f'where index = {owner_S[at]}"',
        )
    )
