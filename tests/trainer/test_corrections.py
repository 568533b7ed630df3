"""Off-policy corrections: numbers by hand, the loops of `reference_losses`, one's own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer import reference_losses as reference
from tests.trainer.loss_samples import drawn_samples, inputs_of, of_ratios
from tests.trainer.reference_losses import Token
from trainer.algorithms.correction_metrics import correction_metrics
from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.corrections import Correction, opsm_keeps, rollout_correction
from trainer.settings import AlgorithmSettings

LN2, LN3 = math.log(2), math.log(3)


def sample(*mismatch, mask=None, advantages=None):
    """Old − rollout log-prob of each token."""
    n = len(mismatch)
    return of_ratios([1.0] * n, advantages or [1.0] * n, mask=mask, mismatch=mismatch)


def tis_settings(path=None, **values) -> AlgorithmSettings:
    return AlgorithmSettings(use_tis=True, custom_tis_function_path=path, **values)


def correct(samples, path=None, **values) -> Correction:
    result = rollout_correction(inputs_of(samples), tis_settings(path, **values))
    assert result is not None
    return result


def weights(samples, path=None, **values) -> list[float]:
    return pytest.approx(correct(samples, path, **values).weights_N.tolist(), rel=1e-6)


def test_log_ratio_of_three():
    assert weights([sample(LN3)]) == [2.0]
    assert weights([sample(LN3)], "icepop") == [0.0]
    assert weights([sample(LN3)], tis_clip=4.0) == [3.0]
    assert weights([sample(LN3)], "icepop", tis_clip=4.0) == [3.0]
    assert weights([sample(-LN3)]) == [1 / 3]
    assert weights([sample(-LN3)], tis_clip_low=0.5) == [0.5]
    assert weights([sample(-LN3)], "icepop", tis_clip_low=0.5) == [0.0]


def test_none_unless_asked_for():
    assert rollout_correction(inputs_of([sample(LN3)]), AlgorithmSettings()) is None


def test_the_policy_in_training_does_not_enter():
    """current − old is ln 5 here, old − rollout is ln 3."""
    moved = [t._replace(log_prob=t.old + math.log(5)) for t in sample(LN3)]
    assert weights([moved], tis_clip=10.0) == [3.0]


def test_tool_tokens_and_masked_samples():
    """Whatever stands at a masked token; it weighs 0, and the sample's product passes over it."""
    wild = Token(0.0, 300.0, -1e30, 1.0, False)
    for path in (None, "icepop", "mis"):
        result = correct([[sample(LN2)[0], wild], [wild, wild], []], path)
        assert result.weights_N.tolist() == pytest.approx([2.0, 0, 0, 0])
        assert result.keep_N.tolist() == [True, False, False, False]
    mis = correct(
        [[sample(LN2)[0], wild], [wild]], "mis", mis_level="sequence", mis_upper_bound=9.0
    )
    assert mis.weights_N.tolist() == pytest.approx([2.0, 0, 0])


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [3.0, 1 / 3, 3.0, 1.0]), ("sequence", [3.0] * 4), ("geometric", [3**0.25] * 4)],
)
def test_levels_of_mis(level, expected):
    samples = [sample(LN3, -LN3, LN3, 0.0)]
    assert weights(samples, "mis", mis_level=level, mis_upper_bound=10.0) == expected


def test_modes_of_mis():
    samples = [sample(LN3, -LN3, 0.1)]
    e = math.exp(0.1)
    assert weights(samples, "mis", mis_mode="truncate") == [2.0, 1 / 3, e]
    assert weights(samples, "mis", mis_mode="clip") == [2.0, 0.5, e]
    assert weights(samples, "mis", mis_mode="clip", mis_lower_bound=0.4) == [2.0, 0.4, e]
    masked = correct(samples, "mis", mis_mode="mask")
    assert masked.weights_N.tolist() == pytest.approx([3.0, 1 / 3, e], rel=1e-6)
    assert masked.keep_N.tolist() == [False, False, True]


def test_sequence_mask_rejects_whole_samples():
    result = correct(
        [sample(LN2, LN2), sample(LN2, -LN2)], "mis", mis_mode="mask", mis_level="sequence"
    )
    assert result.keep_N.tolist() == [False, False, True, True]


def test_veto_rejects_the_sample_of_one_token():
    """Below 1e-4: e^−10. Its sibling tokens go too; the other sample stays."""
    samples = [sample(0.0, -10.0, 0.0), sample(-9.0)]
    result = correct(samples, "mis", mis_veto_threshold=1e-4)
    assert result.keep_N.tolist() == [False, False, False, True]
    masked_away = [sample(0.0, -10.0, mask=[1, 0])]
    assert correct(masked_away, "mis", mis_veto_threshold=1e-4).keep_N.tolist() == [True, False]


def test_batch_normalisation():
    """Tokens 2, 1, 1: mean 4/3. Of samples: products 2 and 1, mean 3/2."""
    samples = [sample(LN2, 0.0), sample(0.0)]
    assert weights(samples, "mis", mis_batch_normalize=True) == [1.5, 0.75, 0.75]
    assert weights(samples, "mis", mis_batch_normalize=True, mis_level="sequence") == [
        4 / 3,
        4 / 3,
        2 / 3,
    ]


def test_bound_of_the_log_ratio():
    mode = {"mis_upper_bound": 1e30, "mis_lower_bound": 0.0}
    assert weights([sample(30.0, -30.0)], "mis", **mode) == [math.exp(20), math.exp(-20)]


def test_opsm():
    """Mean of old − current: 0.3 and 0.1; δ = 0.2; only where A < 0."""

    def moved(advantages, differences, mask):
        return [
            Token(-1.0 - d, -1.0, -1.0, a, bool(m))
            for a, d, m in zip(advantages, differences, mask, strict=True)
        ]

    samples = [
        moved([-1.0, 1.0, -1.0], [0.5, 0.1, 99.0], [1, 1, 0]),
        moved([-1.0, -1.0], [0.2, 0.0], [1, 1]),
        moved([-1.0], [99.0], [0]),
    ]
    inputs = inputs_of(samples)
    algorithm = AlgorithmSettings(use_opsm=True, opsm_delta=0.2)
    keeps = opsm_keeps(inputs, algorithm)
    assert keeps.tolist() == [False, True, False, True, True, True]
    metrics = correction_metrics(inputs, algorithm, keeps.float())
    assert metrics["opsm_clipfrac"] == 0.25
    assert metrics["correction_zero_fraction"] == 0.25


def test_metrics_of_tis():
    samples = [sample(LN3, 0.0, -LN2, 5.0, mask=[1, 1, 1, 0])]
    inputs = inputs_of(samples)
    for path, mean in ((None, 3.5 / 3), ("icepop", 1.5 / 3)):
        algorithm = tis_settings(path)
        result = rollout_correction(inputs, algorithm)
        assert correction_metrics(inputs, algorithm, result.weights_N) == pytest.approx(
            {
                "correction_weight_mean": mean,
                "correction_zero_fraction": 1 / 3 if path else 0.0,
                "tis": 4.5 / 3,
                "tis_abs": 2.5 / 3,
                "tis_clipfrac": 1 / 3,
            }
        )
    assert correction_metrics(inputs, AlgorithmSettings(), torch.ones(4)) == {}


def test_metrics_of_mis():
    samples = [sample(LN3, -LN3), sample(-10.0), sample(0.0, mask=[0])]
    inputs = inputs_of(samples)
    algorithm = tis_settings("mis", mis_mode="mask", mis_veto_threshold=1e-4)
    result = rollout_correction(inputs, algorithm)
    weights_N = torch.where(result.keep_N, result.weights_N, 0.0)
    assert correction_metrics(inputs, algorithm, weights_N) == pytest.approx(
        {
            "correction_weight_mean": 0.0,
            "correction_zero_fraction": 1.0,
            "mis_mean_is_weight_before_clip": (3 + 1 / 3 + math.exp(-10)) / 3,
            "mis_mask_fraction_low": 2 / 3,
            "mis_mask_fraction_high": 1 / 3,
            "mis_catastrophic_token_fraction": 1 / 3,
            "mis_catastrophic_seq_fraction": 1 / 2,
        }
    )


def test_names_of_slime():
    for path, name in (
        (None, "tis"),
        ("mis", "mis"),
        ("slime.backends.megatron_utils.loss.icepop_function", "icepop"),
        ("examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp", "mis"),
        ("mine.correct", "mine.correct"),
    ):
        assert correction_name(path) == name


def halved(inputs, algorithm):
    """A correction of one's own."""
    return Correction(weights_N=torch.full_like(inputs.advantages_N, 0.5), keep_N=inputs.mask_N)


def no_correction(inputs, algorithm):
    return inputs.advantages_N


def not_finite(inputs, algorithm):
    return Correction(weights_N=inputs.advantages_N * math.nan, keep_N=inputs.mask_N)


def wrong_keep(inputs, algorithm):
    return Correction(weights_N=inputs.advantages_N, keep_N=inputs.advantages_N)


def test_custom_correction():
    assert weights([sample(LN3)], f"{__name__}:halved") == [0.5]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("iecpop", "icepop, mis, tis"),
        (f"{__name__}:no_correction", "Tensor"),
        (f"{__name__}:not_finite", "not finite"),
        (f"{__name__}:wrong_keep", "keep_N: torch.float32"),
        ("os.getcwd", "TypeError"),
    ],
)
def test_corrections_that_cannot_work(path, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        correct([sample(LN3)], path)
    assert "--custom-tis-function-path" in str(caught.value)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_equals_the_second_implementation(data):
    samples = data.draw(drawn_samples(spread=2.0))
    name = data.draw(st.sampled_from(["tis", "icepop", "mis"]))
    mis = (
        {
            "mis_level": data.draw(st.sampled_from(["token", "sequence", "geometric"])),
            "mis_mode": data.draw(st.sampled_from(["truncate", "clip", "mask"])),
            "mis_upper_bound": data.draw(st.floats(1.1, 5)),
            "mis_lower_bound": data.draw(st.none() | st.floats(0, 1)),
            "mis_veto_threshold": data.draw(st.none() | st.floats(0.1, 0.9)),
            "mis_batch_normalize": data.draw(st.booleans()),
        }
        if name == "mis"
        else {}
    )
    algorithm = tis_settings(
        name,
        tis_clip=data.draw(st.floats(1, 4)),
        tis_clip_low=data.draw(st.floats(0, 1)),
        use_opsm=True,
        opsm_delta=data.draw(st.floats(0, 0.5)),
        **mis,
    )
    edges = reference.Edges()
    expected, keeps = reference.correction(name, samples, algorithm, edges)
    opsm = reference.opsm_keeps(samples, algorithm, edges)
    assume(edges.nearest > 1e-4)
    inputs = inputs_of(samples)
    result = rollout_correction(inputs, algorithm)
    np.testing.assert_allclose(result.weights_N.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result.keep_N.numpy(), keeps)
    np.testing.assert_array_equal(opsm_keeps(inputs, algorithm).numpy(), opsm)
