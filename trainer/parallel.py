"""Starts torch.distributed and Megatron's process groups, and pins what decides the bits."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ledger.errors import InvalidArgument, explain
from trainer.megatron import (
    megatron_version,
    model_parallel_cuda_manual_seed,
    parallel_state,
)
from trainer.settings import ParallelSettings

__all__ = ["determinism_report", "device", "initialize", "seed_everything", "shutdown"]

_started: tuple[ParallelSettings, int, bool] | None = None


def device() -> torch.device:
    """Where the model lives: the current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(
    settings: ParallelSettings, *, seed: int, num_threads: int, deterministic: bool
) -> None:
    """Start the process groups, pin the threads and seed every generator.

    Works without torchrun for one process. Calling it again with the same layout, threads and
    determinism seeds anew and does nothing else; after success the random state is a function of
    `seed` alone.

    Raises InvalidArgument where the layout is not one that this version runs, or differs from the
    one that was started.
    """
    global _started
    _check_layout(settings)
    asked = (settings, num_threads, deterministic)
    if _started is not None and _started != asked:
        raise InvalidArgument(
            explain(
                "starting the process groups a second time",
                expected=f"the layout, threads and determinism they were started with: {_started}",
                found=asked,
                do="call shutdown() first",
            )
        )
    if _started is None:
        _pin(num_threads, deterministic)
        _start_groups(settings)
        _started = asked
    seed_everything(seed)


def _check_layout(settings: ParallelSettings) -> None:
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ):
        if getattr(settings, name) != 1:
            raise InvalidArgument(
                explain(
                    "laying out the training",
                    on=f"--{name.replace('_', '-')}",
                    expected="1: this version trains on one rank",
                    found=getattr(settings, name),
                )
            )
    if settings.expert_tensor_parallel_size not in (None, 1):
        # A size that differs between model and process groups would leave expert gradients
        # unreduced without a word, so the one number is checked here and handed to both.
        raise InvalidArgument(
            explain(
                "laying out the training",
                on="--expert-tensor-parallel-size",
                expected="1, as the tensor parallel size",
                found=settings.expert_tensor_parallel_size,
            )
        )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise InvalidArgument(
            explain(
                "laying out the training",
                on="WORLD_SIZE",
                expected="1: this version trains on one rank",
                found=world_size,
            )
        )


def _pin(num_threads: int, deterministic: bool) -> None:
    if num_threads < 1:
        raise InvalidArgument(
            explain("pinning the threads", on="--num-threads", expected="≥ 1", found=num_threads)
        )
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)
    # Filling every fresh tensor with NaN would cost a pass over memory for each; nothing here reads
    # memory that it did not write (Megatron's attention buffer enters baddbmm with beta=0).
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False


def _start_groups(settings: ParallelSettings) -> None:
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        # torch exports HashStore without telling its type stubs.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
            context_parallel_size=settings.context_parallel_size,
            expert_model_parallel_size=settings.expert_model_parallel_size,
            expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        )


def seed_everything(seed: int) -> None:
    """Set torch's generators and Megatron's tracked ones to a state that depends on `seed` alone.

    Without CUDA, Megatron's tracker is the one for inference, which holds no state: dropout is 0.
    """
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        # Megatron adds offsets of some thousands; numpy-style seeds end at 2**32.
        seed % (2**31),
        inference_rng_tracker=not torch.cuda.is_available(),
        force_reset_rng=True,
    )
    torch.manual_seed(seed)


def shutdown() -> None:
    """End the process groups; after it `initialize` may be called with another layout."""
    global _started
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _started = None


def determinism_report() -> dict[str, Any]:
    """What decides the bits of a step in this process, for the record of a run."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "device": str(device()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "megatron_core": megatron_version,
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
