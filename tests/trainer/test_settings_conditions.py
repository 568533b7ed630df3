"""Settings of losses and corrections that exclude or need each other, with the reason."""

from __future__ import annotations

import math

import pytest

from ledger.errors import InvalidArgument
from trainer.option_values import validate
from trainer.settings import AlgorithmSettings, algorithm_settings

MIS = {"use_tis": True, "custom_tis_function_path": "mis"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}, "one of them at 0"),
        ({"kl_loss_coef": 0.1}, "--use-kl-loss"),
        ({"use_unbiased_kl": True}, "--use-kl-loss"),
        ({"eps_clip_c": 1.0}, "above 1"),
        ({"rollout_temperature": 0.0}, "above 0"),
        ({"eps_clip": -0.1}, "--eps-clip"),
        ({"eps_clip": math.nan}, "--eps-clip"),
        ({"cispo_form": "miniMax"}, "slime or canonical"),
        ({"tau_neg": 0.0}, "--tau-neg"),
        ({"clip_cov_ratio": 0.0}, "--clip-cov-ratio"),
        ({"clip_cov_lb": 6.0}, "below the upper"),
        ({"vespo_lambda_pos": 0.0}, "--vespo-lambda-pos"),
        ({"loss_aggregation": "mean"}, "one of rollout, token"),
        ({"loss_aggregation": "grpo", "calculate_per_token_loss": True}, "one of them"),
        ({"loss_aggregation": "dr_grpo"}, "a number above 0 with --loss-aggregation dr_grpo"),
        ({"loss_scale_factor": 9.0}, "divides by no constant"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "these are the same"),
        ({"custom_tis_function_path": "icepop"}, "icepop without --use-tis"),
        ({"use_tis": True, "tis_clip": 0.5, "tis_clip_low": 0.9}, "at most --tis-clip"),
        ({"use_tis": True, "mis_level": "sequence"}, "--custom-tis-function-path mis"),
        ({**MIS, "mis_level": "sample"}, "one of token, sequence, geometric"),
        ({**MIS, "mis_mode": "drop"}, "one of truncate, clip, mask"),
        ({**MIS, "mis_lower_bound": 2.0}, "below --mis-upper-bound"),
        ({**MIS, "mis_upper_bound": 0.5}, "below --mis-upper-bound"),
        ({**MIS, "mis_veto_threshold": 1.0}, "below 1"),
        ({"opsm_delta": -1.0}, "--opsm-delta"),
    ],
)
def test_settings_that_cannot_work(given, message):
    with pytest.raises(InvalidArgument, match=message):
        AlgorithmSettings(**given)


def test_settings_that_can():
    made = AlgorithmSettings(**MIS, mis_level="geometric", mis_mode="mask", mis_upper_bound=1.001)
    assert made.aggregation == "rollout"
    assert AlgorithmSettings(calculate_per_token_loss=True).aggregation == "token"


def test_the_constant_of_dr_grpo_is_the_longest_response_by_default():
    values = validate({"loss_aggregation": "dr_grpo", "rollout_max_response_len": 32})
    assert algorithm_settings(values).loss_scale_factor == 32.0
    values = validate({"loss_aggregation": "dr_grpo", "loss_scale_factor": 7.0})
    assert algorithm_settings(values).loss_scale_factor == 7.0
    assert algorithm_settings(validate({})).loss_scale_factor is None
