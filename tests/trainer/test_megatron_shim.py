"""The CPU shim: which versions it was checked with, and that it leaves torch alone."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.megatron_models import needs_cpu
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.usefixtures("megatron")


def test_it_was_checked_with_the_installed_version() -> None:
    from trainer.cpu_shim import CHECKED_VERSIONS
    from trainer.megatron import megatron_version

    assert megatron_version in CHECKED_VERSIONS, (
        f"megatron-core {megatron_version} is not among {CHECKED_VERSIONS}: "
        "run these tests with it, then add it"
    )


@needs_cpu
def test_torch_itself_is_as_it_was() -> None:
    assert torch.cuda.current_device.__module__.startswith("torch.")
    assert torch.compile.__module__ == "torch"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@needs_cpu
def test_megatron_gets_the_cpu_where_it_asks_for_cuda() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads

    assert clip_grads.torch is not torch
    assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
    assert clip_grads.torch.cuda.current_device() == torch.device("cpu")
    assert clip_grads.torch.nn is torch.nn


@needs_cpu
def test_the_type_of_tensors_is_changed_only_for_the_optimizer() -> None:
    from trainer.cpu_shim import optimizer_on_cpu

    with optimizer_on_cpu():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.int32).dtype == torch.int32
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_layout_that_one_process_cannot_form_is_refused() -> None:
    from trainer.parallel import initialize

    with pytest.raises(ValueError, match="tensor × pipeline"):
        initialize(
            ParallelSettings(tensor_model_parallel_size=2),
            seed=0,
            num_threads=1,
            deterministic=True,
        )
    with pytest.raises(ValueError, match="a second time"):
        initialize(ParallelSettings(), seed=0, num_threads=2, deterministic=True)


def test_the_report_says_what_decides_the_bits() -> None:
    from trainer.parallel import determinism_report

    report = determinism_report()
    assert report["deterministic_algorithms"] is True
    assert report["num_threads"] == 1
    assert report["megatron_core"]
