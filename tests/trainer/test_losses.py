"""Policy losses: values by hand, which clip bites, gradients, and the loops of `reference`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer import reference
from trainer.algorithms.losses import LossInputs, TokenLoss, policy_loss
from trainer.settings import AlgorithmSettings


def inputs(ratios, advantages, *, requires_grad=False) -> LossInputs:
    log_probs = torch.log(torch.tensor(ratios, dtype=torch.float32)) - 1.0
    return LossInputs(
        log_probs_N=log_probs.requires_grad_(requires_grad),
        old_log_probs_N=torch.full_like(log_probs, -1.0, requires_grad=False),
        rollout_log_probs_N=torch.full_like(log_probs, -1.0, requires_grad=False),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        mask_N=torch.ones(log_probs.shape, dtype=torch.bool),
        sequence_N=torch.zeros(log_probs.shape, dtype=torch.int64),
        n_sequences=1,
    )


def test_ppo_clip_by_hand():
    result = policy_loss(
        inputs([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 1.0, 1.0, -1.0, -1.0]),
        AlgorithmSettings(eps_clip=0.2, eps_clip_high=0.28),
    )
    torch.testing.assert_close(
        result.loss_N, torch.tensor([-2.0, -1.28, -0.5, 1.5, 0.8]), atol=1e-6, rtol=0
    )
    assert result.clipped_low_N.tolist() == [False, False, False, False, True]
    assert result.clipped_high_N.tolist() == [False, True, False, False, False]


def test_eps_clip_high_defaults_to_eps_clip():
    result = policy_loss(inputs([1.5], [1.0]), AlgorithmSettings(eps_clip=0.1))
    assert result.loss_N.item() == pytest.approx(-1.1)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    result = policy_loss(
        inputs([8.0, 8.0, 0.5], [-1.0, 1.0, -1.0]), AlgorithmSettings(eps_clip_c=3.0)
    )
    torch.testing.assert_close(result.loss_N, torch.tensor([3.0, -1.2, 0.8]), atol=1e-6, rtol=0)


def test_gradient_is_the_ratio_times_the_advantage_where_no_clip_bites():
    given_inputs = inputs([1.1, 1.5, 0.5, 8.0], [2.0, 1.0, -1.0, -1.0], requires_grad=True)
    policy_loss(given_inputs, AlgorithmSettings(eps_clip_c=3.0)).loss_N.sum().backward()
    torch.testing.assert_close(
        given_inputs.log_probs_N.grad, torch.tensor([-2.2, 0.0, 0.0, 0.0]), atol=1e-6, rtol=0
    )


def reinforce(inputs, settings):
    """A custom loss: −A log p."""
    never = torch.zeros_like(inputs.mask_N)
    return TokenLoss(
        loss_N=-inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=never,
        clipped_high_N=never,
    )


def test_custom_loss():
    algorithm = AlgorithmSettings(policy_loss=f"{__name__}:reinforce")
    assert policy_loss(inputs([1.0], [2.0]), algorithm).loss_N.item() == 2.0


def wrong_type(inputs, settings):
    return inputs.log_probs_N


def no_tensor(inputs, settings):
    return TokenLoss(loss_N=0.0, clipped_low_N=None, clipped_high_N=None)


def no_clips(inputs, settings):
    return TokenLoss(loss_N=-inputs.log_probs_N, clipped_low_N=None, clipped_high_N=None)


def no_gradient(inputs, settings):
    never = torch.zeros_like(inputs.mask_N)
    return TokenLoss(loss_N=inputs.advantages_N.clone(), clipped_low_N=never, clipped_high_N=never)


def fails(inputs, settings):
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", "ppo_clip"),
        (f"{__name__}:wrong_type", "Tensor"),
        (f"{__name__}:no_tensor", "a float"),
        (f"{__name__}:no_clips", "clipped_low_N or clipped_high_N"),
        (f"{__name__}:no_gradient", "no gradient"),
        (
            f"{__name__}:fails",
            r"(?s)micro-batch of 1 samples, 1 response tokens.*ZeroDivisionError: on purpose",
        ),
        ("os.getcwd", "TypeError"),
        ("no_such_module:f", "ModuleNotFoundError"),
    ],
)
def test_losses_that_cannot_work(name, message):
    given_inputs = inputs([1.0], [1.0])
    given_inputs.log_probs_N.requires_grad_()
    with pytest.raises(InvalidArgument, match=message) as caught:
        policy_loss(given_inputs, AlgorithmSettings(policy_loss=name))
    assert "--policy-loss" in str(caught.value)


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [
        ({"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}, "one of them at 0"),
        ({"kl_loss_coef": 0.1}, "--use-kl-loss"),
        ({"eps_clip_c": 1.0}, "above 1"),
        ({"rollout_temperature": 0.0}, "above 0"),
        ({"eps_clip": -0.1}, "--eps-clip"),
        ({"eps_clip": math.nan}, "--eps-clip"),
    ],
)
def test_settings_that_cannot_work(settings_given, message):
    with pytest.raises(InvalidArgument, match=message):
        AlgorithmSettings(**settings_given)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    log_prob=st.floats(-8, 0, width=32),
    old=st.floats(-8, 0, width=32),
    advantage=st.floats(-3, 3, width=32),
    low=st.floats(0, 0.5),
    high=st.none() | st.floats(0, 0.5),
    dual=st.none() | st.floats(1.5, 5),
)
def test_equals_the_second_implementation(log_prob, old, advantage, low, high, dual):
    given_inputs = LossInputs(
        log_probs_N=torch.tensor([log_prob]),
        old_log_probs_N=torch.tensor([old]),
        rollout_log_probs_N=torch.zeros(1),
        advantages_N=torch.tensor([advantage]),
        mask_N=torch.ones(1, dtype=torch.bool),
        sequence_N=torch.zeros(1, dtype=torch.int64),
        n_sequences=1,
    )
    algorithm = AlgorithmSettings(eps_clip=low, eps_clip_high=high, eps_clip_c=dual)
    expected = reference.ppo_clip(
        log_prob, old, advantage, low, low if high is None else high, dual
    )
    assert policy_loss(given_inputs, algorithm).loss_N.item() == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )
