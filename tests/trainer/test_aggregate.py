"""Weights of tokens in the loss of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer import reference_losses as reference
from trainer.algorithms.aggregate import token_weights
from trainer.settings_conditions import AGGREGATIONS

MASK, LENGTHS, ROLLOUTS = [1, 1, 0, 1, 1], [2, 2, 1], [1, 1, 2]


def weights(mask, lengths, rollouts, aggregation="rollout", scale=10.0):
    return token_weights(
        np.asarray(mask, np.uint8),
        np.asarray(lengths, np.int64),
        np.asarray(rollouts, np.int64),
        aggregation=aggregation,
        global_batch_size=len(set(rollouts)),
        loss_scale_factor=scale,
    )


def test_siblings_share_one_denominator():
    """Rollout 1: two samples, 2 + 1 loss tokens; rollout 2: one token. Each weighs 1/2."""
    got = weights(MASK, LENGTHS, ROLLOUTS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [1 / 6, 1 / 6, 0, 1 / 6, 1 / 2], atol=1e-7)


def test_three_siblings_weigh_as_much_as_one_other_rollout():
    """Four samples of one token, the first three of one rollout."""
    got = weights([1] * 4, [1] * 4, [7, 7, 7, 9])
    np.testing.assert_allclose(got, [1 / 6, 1 / 6, 1 / 6, 1 / 2], atol=1e-7)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["token", "token-mean", "dapo", "bnpo"], [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4]),
        (["token-sum"], [1, 1, 0, 1, 1]),
        (["seq-mean-token-mean", "grpo"], [1 / 6, 1 / 6, 0, 1 / 3, 1 / 3]),
        (["seq-mean-token-sum", "luspo"], [1 / 3, 1 / 3, 0, 1 / 3, 1 / 3]),
        (["seq-mean-token-sum-norm", "dr_grpo"], [1 / 30, 1 / 30, 0, 1 / 30, 1 / 30]),
    ],
)
def test_modes_by_hand(names, expected):
    for name in names:
        np.testing.assert_allclose(weights(MASK, LENGTHS, ROLLOUTS, name), expected, atol=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fully_masked(aggregation):
    assert weights([0, 0], [1, 1], [1, 2], aggregation).tolist() == [0, 0]
    assert weights([], [0], [1], aggregation).tolist() == []
    got = weights([0, 0, 1], [2, 1], [1, 2], aggregation)
    assert got[:2].tolist() == [0, 0]
    assert got[2] > 0


@pytest.mark.parametrize(("aggregation", "scale"), [("mean", 1.0), ("dr_grpo", None)])
def test_what_cannot_be_weighed(aggregation, scale):
    with pytest.raises(InvalidArgument, match="--loss-aggregation"):
        weights([1], [1], [1], aggregation, scale)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(AGGREGATIONS))
def test_equals_the_second_implementation(data, aggregation):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    rollouts = [data.draw(st.integers(0, 3)) for _ in lengths]
    masks = [[data.draw(st.integers(0, 1)) for _ in range(n)] for n in lengths]
    scale = data.draw(st.floats(0.5, 50))
    got = weights([m for ms in masks for m in ms], lengths, rollouts, aggregation, scale)
    expected = reference.weights(aggregation, masks, rollouts, scale)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
