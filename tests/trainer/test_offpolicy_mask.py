"""Which tokens of a sample that was resumed by a later version enter the loss."""

from __future__ import annotations

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from trainer.algorithms.offpolicy_mask import mask_offpolicy


def mask(versions, offsets, sampled=None):
    versions_N = np.asarray(versions, np.int64)
    sampled_N = np.ones(len(versions), np.uint8) if sampled is None else np.asarray(sampled)
    return mask_offpolicy(versions_N, sampled_N.astype(np.uint8), np.asarray(offsets, np.int64))


def test_ten_tokens_by_version_3_and_six_by_version_4():
    got = mask([3] * 10 + [4] * 6, [0, 16])
    assert got.dtype == np.uint8
    assert got.tolist() == [0] * 10 + [1] * 6


def test_each_sample_has_its_own_newest_version():
    """Also an observation between two turns, an empty sample, and one of observations alone."""
    versions = [3, 3, 3, -1, 5, 4, 5, -1, -1]
    sampled = [1, 1, 1, 0, 1, 1, 1, 0, 0]
    got = mask(versions, [0, 2, 2, 5, 7, 9], sampled)
    assert got.tolist() == [1, 1, 0, 0, 1, 0, 1, 0, 0]


def test_no_sample_at_all():
    assert mask([], [0]).tolist() == []
    assert mask([], [0, 0, 0]).tolist() == []


def test_an_unknown_version_is_refused():
    with pytest.raises(InvalidArgument, match="sample 1 of the batch, token 1"):
        mask([3, 4, -1], [0, 1, 3])
