"""`--mask-offpolicy-in-partial-rollout`: which tokens of a resumed sample are on-policy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain
from ledger.events import UNKNOWN_VERSION

__all__ = ["mask_offpolicy"]


def mask_offpolicy(
    weight_versions_N: npt.NDArray[np.int64],
    sampled_N: npt.NDArray[np.uint8],
    offsets_N: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    """[N] 1 where a token was sampled by the newest version that sampled a token of its sample.

    10 tokens by version 3, then 6 by version 4: ten zeros, six ones. `offsets_N` [B+1] cuts the N
    response tokens into samples. Observations are 0, and so is a sample without a sampled token.

    Raises InvalidArgument for a sampled token whose version the engine did not say.
    """
    sampled = sampled_N > 0
    unknown = np.flatnonzero(sampled & (weight_versions_N == UNKNOWN_VERSION))
    if len(unknown):
        sample = int(np.searchsorted(offsets_N, unknown[0], side="right")) - 1
        raise InvalidArgument(
            explain(
                "masking tokens of older versions",
                on=f"--mask-offpolicy-in-partial-rollout, sample {sample} of the batch, token "
                f"{unknown[0] - offsets_N[sample]}",
                expected="the weight version that sampled it",
                found="none: the engine did not say",
                do="leave the option out, or sample with an engine that reports its version",
            )
        )
    versions = np.where(sampled, weight_versions_N, UNKNOWN_VERSION)
    newest_B = np.full(len(offsets_N) - 1, UNKNOWN_VERSION, np.int64)
    lengths_B = np.diff(offsets_N)
    filled = lengths_B > 0  # reduceat takes no empty slice
    if filled.any():
        newest_B[filled] = np.maximum.reduceat(versions, offsets_N[:-1][filled])
    newest = sampled & (versions == np.repeat(newest_B, lengths_B))
    return np.asarray(newest, np.uint8)
