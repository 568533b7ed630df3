"""Losses and their gradients against the loops of `reference_losses`, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.trainer import reference_losses as reference
from tests.trainer.loss_samples import drawn_samples, inputs_of
from trainer.algorithms.losses import POLICY_LOSS_ALIASES, POLICY_LOSSES, policy_loss
from trainer.settings import AlgorithmSettings

NAMES = sorted(set(POLICY_LOSSES) - set(POLICY_LOSS_ALIASES))


@st.composite
def algorithms(draw, name):
    return AlgorithmSettings(
        policy_loss=name,
        eps_clip=draw(st.floats(0, 0.5)),
        eps_clip_high=draw(st.none() | st.floats(0, 0.5)),
        eps_clip_c=draw(st.none() | st.floats(1.5, 5)),
        cispo_form=draw(st.sampled_from(["slime", "canonical"])),
        tau_pos=draw(st.floats(0.5, 2)),
        tau_neg=draw(st.floats(0.5, 2)),
        clip_cov_ratio=draw(st.floats(0.01, 1)),
        clip_cov_lb=draw(st.floats(-2, 0.5)),
        clip_cov_ub=draw(st.floats(0.6, 3)),
        kl_cov_ratio=draw(st.floats(0.01, 1)),
        ppo_kl_coef=draw(st.floats(0, 2)),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data())
def test_value(name, data):
    samples = data.draw(drawn_samples())
    algorithm = data.draw(algorithms(name))
    edges = reference.Edges()
    expected = reference.losses(name, samples, algorithm, None, edges)
    assume(edges.nearest > 1e-4)
    given_inputs = inputs_of(samples)
    got = policy_loss(given_inputs, algorithm).loss_N.numpy()
    got = np.where(given_inputs.mask_N.numpy(), got, 0)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def sloped(name, samples, algorithm, weights, at, step):
    """Σ w · loss with one log-prob moved by `step`; what has no gradient stays where it was."""
    flat = iter(range(10**6))
    moved = [
        [t._replace(log_prob=t.log_prob + step) if next(flat) == at else t for t in sample]
        for sample in samples
    ]
    made = reference.losses(name, moved, algorithm, samples, reference.Edges())
    return float(np.dot(made, weights))


@pytest.mark.parametrize("name", NAMES)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(data=st.data())
def test_gradient_by_finite_differences(name, data):
    samples = data.draw(drawn_samples())
    tokens = [t for sample in samples for t in sample]
    assume(any(t.mask for t in tokens))
    algorithm = data.draw(algorithms(name))
    edges = reference.Edges()
    reference.losses(name, samples, algorithm, None, edges)
    assume(edges.nearest > 1e-3)
    weights = np.array([(1 + i % 3) / 4 if t.mask else 0.0 for i, t in enumerate(tokens)])
    given_inputs = inputs_of(samples, requires_grad=True)
    loss_N = policy_loss(given_inputs, algorithm).loss_N
    (torch.from_numpy(weights).float() * loss_N).sum().backward()
    for at, token in enumerate(tokens):
        if not token.mask:
            continue
        h = 1e-5
        low, here, high = (sloped(name, samples, algorithm, weights, at, x) for x in (-h, 0, h))
        # At a kink (a bound of the clip, |log ρ| at 0) there is no slope to compare with.
        if abs((high - here) - (here - low)) > 1e-3 * h:
            continue
        found = float(given_inputs.log_probs_N.grad[at])
        assert found == pytest.approx((high - low) / (2 * h), rel=1e-3, abs=1e-4)
