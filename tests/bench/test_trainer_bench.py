"""What the trainer's benchmarks compare: operations by hand, devices, the case on both sides."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from tests.bench import gpu
from tests.bench.flops import ModelShape, forward_flops, peak_flops, step_flops
from tests.bench.trainer_case import Case
from tests.bench.trainer_step import FULL, QUICK

SHAPE = ModelShape(
    hidden_size=4,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
)


def test_operations_by_hand() -> None:
    # A layer: queries and output 4·4 each, keys and values 4·2 each, three matrices 4·8.
    assert SHAPE.layer_parameters == 3 * (16 + 16 + 8 + 8 + 96)
    # Two sequences of 5 and 2 tokens; 3 layers of 2 heads of 2 channels, 29 pairs.
    expected = 2 * 432 * 7 + 2 * 4 * 10 * 7 + 4 * 3 * 4 * 29
    assert forward_flops(SHAPE, [5, 2]) == expected
    assert forward_flops(SHAPE, [5, 2], [3, 1]) == expected - 2 * 4 * 10 * 3
    assert step_flops(SHAPE, [5, 2]) == 3 * expected


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
    ],
)
def test_peaks_of_devices(device: str, bf16: float) -> None:
    assert peak_flops(device, "bf16") == bf16 * 1e12


def test_an_unknown_device_needs_a_peak() -> None:
    with pytest.raises(InvalidArgument, match=r"--peak-tflops"):
        peak_flops("NVIDIA A10G", "bf16")
    assert peak_flops("NVIDIA A10G", "bf16", 70.0) == 70e12


def test_without_a_device_the_benchmark_says_so(monkeypatch, capsys) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("case", [QUICK, FULL, gpu.CASE])
def test_both_sides_get_the_same_long_tailed_case(case: Case) -> None:
    responses = case.responses()
    assert [len(tokens) for tokens in responses] == case.lengths_B.tolist()
    assert case.lengths_B.max() <= case.longest_response
    assert case.lengths_B.max() > 2.5 * case.lengths_B.mean()
    assert case.tokens == sum(map(len, responses)) + case.samples * case.prompt_length
    for group in np.split(np.array(case.rewards()), case.samples // case.n_samples_per_prompt):
        assert 0 < group.mean() < 1
    level = dataclasses.replace(case, same_length=True)
    assert set(level.lengths_B.tolist()) == {case.median_response}
