"""Weights of tokens in the loss of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import reference
from trainer.algorithms.aggregate import token_weights


def weights(mask, lengths, rollouts, *, per_token=False, global_batch_size=None):
    return token_weights(
        np.asarray(mask, np.uint8),
        np.asarray(lengths, np.int64),
        np.asarray(rollouts, np.int64),
        calculate_per_token_loss=per_token,
        global_batch_size=global_batch_size or len(set(rollouts)),
    )


def test_siblings_share_one_denominator():
    """Rollout 1: two samples, 2 + 1 loss tokens; rollout 2: one token. Each weighs 1/2."""
    got = weights([1, 1, 0, 1, 1], [2, 2, 1], [1, 1, 2])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [1 / 6, 1 / 6, 0, 1 / 6, 1 / 2], atol=1e-7)


def test_per_token():
    got = weights([1, 1, 0, 1, 1], [2, 2, 1], [1, 1, 2], per_token=True)
    assert got.tolist() == [0.25, 0.25, 0, 0.25, 0.25]


@pytest.mark.parametrize("per_token", [False, True])
def test_fully_masked(per_token):
    assert weights([0, 0], [1, 1], [1, 2], per_token=per_token).tolist() == [0, 0]
    got = weights([0, 0, 1], [2, 1], [1, 2], per_token=per_token)
    assert got.tolist() == [0, 0, 1.0 if per_token else 0.5]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), st.booleans())
def test_equals_the_second_implementation(data, per_token):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    rollouts = [data.draw(st.integers(0, 3)) for _ in lengths]
    masks = [[data.draw(st.integers(0, 1)) for _ in range(n)] for n in lengths]
    values = [[data.draw(st.floats(-10, 10)) for _ in range(n)] for n in lengths]
    size = len(set(rollouts))
    got = weights(
        [m for ms in masks for m in ms],
        lengths,
        rollouts,
        per_token=per_token,
        global_batch_size=size,
    ) @ np.array([v for vs in values for v in vs], np.float64)
    expected = reference.aggregate(
        values, masks, rollouts, per_token=per_token, global_batch_size=size
    )
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
