"""KL estimators: values by hand, clamps, and the float64 formulas of `reference`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer import reference_losses as reference
from trainer.algorithms.kl import KL_TYPES, approximate_kl


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", 0.1), ("k2", 0.005), ("k3", 0.0048374), ("low_var_kl", 0.0048374)],
)
def test_log_ratio_of_a_tenth(name, expected):
    got = approximate_kl(torch.tensor([-1.0]), torch.tensor([-1.1]), name)
    assert got.item() == pytest.approx(expected, abs=5e-8)


def test_low_var_kl_clamps_at_ten_and_k3_does_not():
    current, ref = torch.tensor([-9.0]), torch.tensor([0.0])
    assert approximate_kl(current, ref, "low_var_kl").item() == 10.0
    assert approximate_kl(current, ref, "k3").item() == pytest.approx(np.exp(9.0) - 10.0)


@pytest.mark.parametrize(("name", "slope"), [("k1", 1.0), ("k2", 0.1), ("k3", 1 - np.exp(-0.1))])
def test_gradient(name, slope):
    current = torch.tensor([-1.0], requires_grad=True)
    approximate_kl(current, torch.tensor([-1.1]), name).sum().backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("current", [-200.0, 200.0])
def test_low_var_kl_has_no_gradient_beyond_its_clamp(current):
    given_log_prob = torch.tensor([current], requires_grad=True)
    value = approximate_kl(given_log_prob, torch.tensor([0.0]), "low_var_kl")
    value.sum().backward()
    assert value.item() == 10.0
    assert given_log_prob.grad is not None
    assert given_log_prob.grad.item() == 0.0


def test_unknown_type():
    with pytest.raises(InvalidArgument, match="k1, k2, k3, low_var_kl"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_unbiased_kl_weighs_before_it_clamps():
    """d = 0.1 and ratio e^0.5: 0.0048374 · 1.6487213; k3(−3) = 16.0855 · e^−1 is below 10."""
    one = torch.tensor([-1.0])
    got = approximate_kl(one, one - 0.1, "k3", old_log_probs=one - 0.5)
    assert got.item() == pytest.approx(0.0048374 * np.exp(0.5), abs=1e-7)
    got = approximate_kl(one, one + 3, "low_var_kl", old_log_probs=one + 1)
    assert got.item() == pytest.approx((np.exp(3) - 4) * np.exp(-1), rel=1e-6)
    got = approximate_kl(one, one + 3, "low_var_kl", old_log_probs=one - 1)
    assert got.item() == 10.0


def test_the_gradient_goes_through_the_ratio_of_unbiased_kl():
    """At ratio 1 the slope of k1 · ρ is d' + d = 1 + 0.1; the mean of it is that of the KL."""
    current = torch.tensor([-1.0], requires_grad=True)
    old = torch.tensor([-1.0])
    approximate_kl(current, torch.tensor([-1.1]), "k1", old_log_probs=old).sum().backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(1.1, rel=1e-6)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(KL_TYPES)),
    st.floats(-12, 0, width=32),
    st.floats(-12, 0, width=32),
    st.none() | st.floats(-2, 0, width=32),
)
def test_equals_the_second_implementation(name, current, ref, old):
    got = approximate_kl(
        torch.tensor(current),
        torch.tensor(ref),
        name,
        old_log_probs=None if old is None else torch.tensor(old),
    ).item()
    # d itself is rounded to float32: relative error 2⁻²⁴ of it, times the slope of the estimator.
    assert got == pytest.approx(reference.kl(name, current, ref, old), rel=1e-5, abs=1e-6)
