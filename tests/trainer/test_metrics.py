"""Metrics of a step, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.algorithms.metrics import (
    length_metrics,
    mean_where,
    mismatch_metrics,
    reward_metrics,
    spread_metrics,
)


def f32(*values):
    return np.array(values, np.float32)


def mask(*values):
    return np.array(values, np.uint8)


def test_mismatch_is_over_sampled_tokens_only():
    """x = 0, ln 3, a tool token between them: weights 1 and 3, (1 + 3)² / (2 · (1 + 9)) = 0.8."""
    got = mismatch_metrics(f32(-1, -50, -1), f32(-1, np.nan, -1 - np.log(3)), mask(1, 0, 1))
    assert got["logprob_mismatch_mean"] == pytest.approx(np.log(3) / 2, rel=1e-6)
    assert got["logprob_mismatch_max"] == pytest.approx(np.log(3), rel=1e-6)
    assert got["effective_sample_size"] == pytest.approx(0.8, rel=1e-6)
    assert got["behaviour_kl"] == pytest.approx((3 - 1 - np.log(3)) / 2, rel=1e-6)


def test_equal_policies():
    got = mismatch_metrics(f32(-1, -2), f32(-1, -2), mask(1, 1))
    assert list(got.values()) == [0.0, 0.0, 0.0, 1.0]


def test_a_sampled_nan_shows():
    got = mismatch_metrics(f32(-1, -2), f32(-1, np.nan), mask(1, 1))
    assert all(np.isnan(value) for value in got.values())


def test_far_policies_do_not_overflow():
    got = mismatch_metrics(f32(-1, -1), f32(-2000, -1), mask(1, 1))
    assert got["effective_sample_size"] == pytest.approx(0.5)
    assert got["behaviour_kl"] == np.inf


def test_nothing_sampled_is_nan():
    assert np.isnan(mismatch_metrics(f32(-1), f32(np.nan), mask(0))["logprob_mismatch_mean"])
    assert np.isnan(mean_where(f32(1), mask(0)))
    assert np.isnan(spread_metrics("advantage", f32(1), mask(0))["advantage_mean"])


def test_rewards_count_once_a_rollout():
    got = reward_metrics(
        np.array([1.0, 1.0, 1.0, 0.0, 2.0, 2.0]),
        np.array([1.0, 1.0, 1.0, 0.0, 5.0, 2.0]),
        np.array([0, 0, 0, 0, 1, 1]),
        np.array([7, 7, 7, 8, 9, 10]),
    )
    assert got == {
        "reward_mean": 5 / 4,
        "reward_std": pytest.approx(np.sqrt(11 / 16)),
        "raw_reward_mean": 2.0,
        "groups": 2.0,
        "zero_variance_groups": 1.0,
    }


def test_lengths_and_spread():
    assert length_metrics(np.array([1, 4]), np.array([True, False])) == {
        "response_length_mean": 2.5,
        "response_length_max": 4.0,
        "truncated_ratio": 0.5,
    }
    assert spread_metrics("advantage", f32(1, 99, 3), mask(1, 0, 1)) == {
        "advantage_mean": 2.0,
        "advantage_std": 1.0,
        "advantage_min": 1.0,
        "advantage_max": 3.0,
    }
