"""Policy losses: values by hand, which clip bites, and losses of one's own."""

from __future__ import annotations

import math

import pytest
import torch

from ledger.errors import InvalidArgument
from tests.trainer.loss_samples import inputs_of, of_ratios
from tests.trainer.reference_losses import Token
from trainer.algorithms.losses import POLICY_LOSS_ALIASES, POLICY_LOSSES, TokenLoss, policy_loss
from trainer.settings import AlgorithmSettings


def run(sample, name="ppo_clip", **settings) -> TokenLoss:
    """The loss of one sample."""
    return policy_loss(inputs_of([sample]), AlgorithmSettings(policy_loss=name, **settings))


def near(found: torch.Tensor, expected, tolerance=1e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=tolerance, rtol=0)


def test_ppo_clip_by_hand():
    result = run(
        of_ratios([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 1.0, 1.0, -1.0, -1.0]),
        eps_clip=0.2,
        eps_clip_high=0.28,
    )
    near(result.loss_N, [-2.0, -1.28, -0.5, 1.5, 0.8])
    assert result.clipped_low_N.tolist() == [False, False, False, False, True]
    assert result.clipped_high_N.tolist() == [False, True, False, False, False]


def test_eps_clip_high_defaults_to_eps_clip():
    assert run(of_ratios([1.5], [1.0]), eps_clip=0.1).loss_N.item() == pytest.approx(-1.1)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    near(run(of_ratios([8.0, 8.0, 0.5], [-1.0, 1.0, -1.0]), eps_clip_c=3.0).loss_N, [3, -1.2, 0.8])


def gspo_sample():
    """Log-ratios 0.2 and −0.1, mean 0.05, and a masked token between them."""
    return of_ratios(
        [math.exp(0.2), math.exp(5.0), math.exp(-0.1)], [2.0, 2.0, 2.0], mask=[1, 0, 1]
    )


def test_gspo_has_the_ratio_of_the_sample_on_every_token():
    result = run(gspo_sample(), "gspo")
    near(result.loss_N[[0, 2]], [-2 * 1.0512711, -2 * 1.0512711])
    result = run(gspo_sample(), "gspo", eps_clip=3e-4, eps_clip_high=4e-4)
    near(result.loss_N[[0, 2]], [-2 * 1.0004] * 2)
    assert result.clipped_high_N[[0, 2]].all()


def test_gspo_keeps_samples_apart():
    two = [of_ratios([math.exp(0.2), math.exp(-0.1)], [1.0, 1.0]), of_ratios([1.1], [1.0])]
    result = policy_loss(inputs_of(two), AlgorithmSettings(policy_loss="gspo"))
    near(result.loss_N, [-1.0512711, -1.0512711, -1.1])


def test_cispo_weighs_log_probs_by_the_clipped_ratio():
    sample = of_ratios([2.0, 0.5, 1.1], [1.0, 1.0, -1.0])
    log_probs = [t.log_prob for t in sample]
    result = run(sample, "cispo", eps_clip=0.2, eps_clip_high=0.5)
    near(result.loss_N, [-1.5 * log_probs[0], -0.8 * log_probs[1], 1.1 * log_probs[2]])
    assert result.clipped_high_N.tolist() == [True, False, False]
    assert result.clipped_low_N.tolist() == [False, True, False]
    result = run(sample, "cispo", eps_clip=0.2, eps_clip_high=0.5, cispo_form="canonical")
    near(result.loss_N, [-1.5 * log_probs[0], -0.5 * log_probs[1], 1.1 * log_probs[2]])
    assert not result.clipped_low_N.any()


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    """A = 1: log-ratios 0.6 → 0.4 and −0.6 stays; A = −1: 0.6 stays and −0.6 → −0.4."""
    ratios = [math.exp(0.6), math.exp(-0.6)]
    result = run(of_ratios(ratios, [1.0, 1.0]), "gmpo", eps_clip=0.4)
    near(result.loss_N, [-math.exp(-0.1)] * 2)
    assert result.clipped_high_N.tolist() == [True, False]
    assert not result.clipped_low_N.any()
    result = run(of_ratios(ratios, [-1.0, -1.0]), "gmpo", eps_clip=0.4)
    near(result.loss_N, [math.exp(0.1)] * 2)
    assert result.clipped_low_N.tolist() == [False, True]


def test_sapo_gates():
    """At ρ = 1 the gate is (4/τ)/2; at ρ = 2, τ = 1: 4 σ(1) = 2.9242343."""
    result = run(of_ratios([1.0, 1.0, 2.0], [1.0, -1.0, 1.0]), "sapo")
    near(result.loss_N, [-2.0, 2 / 1.05, -2.9242343])


def test_dppo_tv_stops_where_the_probability_moved_too_far():
    """π_old = 0.5 throughout, threshold 0.2: 0.9 up and 0.1 down are stopped."""
    probs, advantages = [0.9, 0.52, 0.1, 0.7], [1.0, 1.0, -1.0, -1.0]
    sample = of_ratios([p / 0.5 for p in probs], advantages, old=math.log(0.5))
    result = run(sample, "dppo_tv", eps_clip=0.2)
    near(result.loss_N, [0.0, -1.04 * math.log(0.52), 0.0, 1.4 * math.log(0.7)])
    assert result.clipped_high_N.tolist() == [True, False, False, False]
    assert result.clipped_low_N.tolist() == [False, False, True, False]


def test_dppo_kl_stops_by_divergence_and_direction():
    """KL(0.5 ‖ 0.9) = 0.5 ln(0.5/0.9) + 0.5 ln(0.5/0.1) = 0.5108256."""
    sample = of_ratios([1.8, 1.8, 1.8], [1.0, -1.0, 1.0], old=math.log(0.5))
    assert run(sample, "dppo_kl", eps_clip=0.51).clipped_high_N.tolist() == [True, False, True]
    assert not run(sample, "dppo_kl", eps_clip=0.512).clipped_high_N.any()
    near(run(sample, "dppo_kl", eps_clip=0.51).loss_N, [0.0, 1.8 * math.log(0.9), 0.0])


def test_dppo_truncates_the_weight():
    sample = of_ratios([4.0], [1.0], old=-6.0)
    assert run(sample, "dppo_tv", eps_clip_c=3.0).loss_N.item() == pytest.approx(
        -3.0 * sample[0].log_prob, rel=1e-6
    )


def test_reinforce():
    near(run(of_ratios([2.0], [3.0]), "reinforce").loss_N, [-3.0 * (math.log(2) - 1)])


def test_vespo():
    """w = 2·2 = 4, A ≥ 0: φ = e^(3 + 2 ln 4 − 12) = 16 e^−9."""
    sample = of_ratios([2.0, 2.0], [1.0, 1.0])
    near(run(sample, "vespo").loss_N, [-16 * math.exp(-9) * (math.log(2) - 1)] * 2)
    sample = of_ratios([1.0], [-1.0])
    near(run(sample, "vespo").loss_N, [-1.0])


def covariance_sample():
    """Means of A and log π are 0 and −2; covariances 4, 1, 0, 1.5·…: see each."""
    rows = [(-0.5, 2.0), (-3.0, -1.0), (-2.0, 1.0), (-2.5, -2.0)]  # 3, 1, 0, 1
    return [Token(p, p, p, a, True) for p, a in rows]


def test_clip_cov_takes_tokens_out_at_even_distances():
    """Covariances 3, 1, 0, 1 with bounds (0.5, 5): candidates 0, 1, 3; one is taken: the middle."""
    result = run(covariance_sample(), "clip_cov", clip_cov_lb=0.5, clip_cov_ratio=0.25)
    near(result.loss_N, [-2.0, 0.0, -1.0, 2.0])
    assert result.clipped_high_N.tolist() == [False, True, False, False]
    result = run(covariance_sample(), "clip_cov", clip_cov_lb=0.5, clip_cov_ratio=1.0)
    near(result.loss_N, [0.0, 0.0, -1.0, 0.0])
    result = run(covariance_sample(), "clip_cov", clip_cov_lb=0.5, clip_cov_ub=2.0)
    near(result.loss_N, [-2.0, 1.0, -1.0, 0.0])


def test_clip_cov_passes_over_clipped_tokens():
    ratios = [2.0, 1.0, 1.0, 1.0]
    sample = [
        t._replace(old=t.log_prob - math.log(r))
        for t, r in zip(covariance_sample(), ratios, strict=True)
    ]
    result = run(sample, "clip_cov", clip_cov_lb=0.5, clip_cov_ratio=1.0)
    near(result.loss_N, [-2.4, 0.0, -1.0, 0.0])
    assert result.clipped_high_N.tolist() == [True, True, False, True]


def test_kl_cov_penalises_the_largest_covariances():
    sample = [t._replace(old=t.log_prob - math.log(1.5)) for t in covariance_sample()]
    penalty = 0.1 * math.log(1.5)
    result = run(sample, "kl_cov", kl_cov_ratio=0.5, ppo_kl_coef=0.1)
    # Tokens 1 and 3 are equal: the earlier one.
    near(result.loss_N, [-3.0 + penalty, 1.5 + penalty, -1.5, 3.0])
    assert result.clipped_high_N.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nothing_in_the_loss(name):
    """No tokens, samples without tokens, a fully masked sample beside another."""
    wild = Token(1e30, -1e30, 300.0, -1e30, False)
    for samples in ([], [[], []], [[wild, wild]], [[wild], of_ratios([1.2], [1.0]), [wild]]):
        given_inputs = inputs_of(samples, requires_grad=True)
        loss_N = policy_loss(given_inputs, AlgorithmSettings(policy_loss=name)).loss_N
        weights_N = given_inputs.mask_N.float()
        (weights_N * loss_N).sum().backward()
        gradient_N = given_inputs.log_probs_N.grad
        assert gradient_N is not None
        assert torch.isfinite(loss_N).all()
        assert torch.isfinite(gradient_N).all()
        assert (gradient_N[~given_inputs.mask_N] == 0).all()
        if given_inputs.mask_N.any():
            alone = inputs_of([of_ratios([1.2], [1.0])])
            expected = policy_loss(alone, AlgorithmSettings(policy_loss=name)).loss_N
            assert loss_N[given_inputs.mask_N].tolist() == expected.tolist()


def test_names_of_verl():
    for alias, name in POLICY_LOSS_ALIASES.items():
        assert POLICY_LOSSES[alias] is POLICY_LOSSES[name]


def own_loss(inputs, settings):
    """A custom loss: −A log p."""
    never = torch.zeros_like(inputs.mask_N)
    return TokenLoss(
        loss_N=-inputs.advantages_N * inputs.log_probs_N,
        clipped_low_N=never,
        clipped_high_N=never,
    )


def test_custom_loss():
    assert run(of_ratios([1.0], [2.0]), f"{__name__}:own_loss").loss_N.item() == 2.0


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
        (f"{__name__}:fails", r"(?s)1 samples, 1 response tokens.*ZeroDivisionError: on purpose"),
        ("os.getcwd", "TypeError"),
        ("no_such_module:f", "ModuleNotFoundError"),
    ],
)
def test_losses_that_cannot_work(name, message):
    given_inputs = inputs_of([of_ratios([1.0], [1.0])], requires_grad=True)
    with pytest.raises(InvalidArgument, match=message) as caught:
        policy_loss(given_inputs, AlgorithmSettings(policy_loss=name))
    assert "--policy-loss" in str(caught.value)
