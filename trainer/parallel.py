"""Starts torch.distributed and Megatron's process groups, and pins what decides the bits."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ledger.errors import InvalidArgument, explain
from trainer.layout import check_layout
from trainer.megatron import (
    megatron_version,
    model_parallel_cuda_manual_seed,
    parallel_state,
)
from trainer.megatron_args import check_on_device
from trainer.settings import ParallelSettings
from trainer.transformer_engine import require_engine

__all__ = ["determinism_report", "device", "initialize", "seed_everything", "shutdown"]

_started: tuple[ParallelSettings, int, bool] | None = None
_own_world = False


def device() -> torch.device:
    """Where the model lives: the current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(
    settings: ParallelSettings,
    *,
    seed: int,
    num_threads: int,
    deterministic: bool,
    timeout_minutes: float = 30,
) -> None:
    """Start the process groups, pin the threads and seed every generator.

    Ranks come from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT);
    without it there is one process. A world that is there already is used as it is. Calling it
    again with the same layout, threads and determinism seeds anew and does nothing else; after
    success the random state is a function of `seed`, the layout and the rank alone.

    A rank that waits longer than `timeout_minutes` for the others raises torch's error.

    Raises InvalidArgument where the layout cannot be run by these ranks, or differs from the one
    that was started, and where a setting for Megatron cannot work here.
    """
    global _started
    world_size = dist.get_world_size() if dist.is_initialized() else _environment()[1]
    check_layout(settings, world_size, cuda=torch.cuda.is_available())
    check_on_device(settings.megatron, cuda=torch.cuda.is_available())
    if settings.context_parallel_size > 1:
        require_engine("--context-parallel-size")
    if settings.megatron.get("transformer_impl", "local") != "local":
        require_engine("--transformer-impl")
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
        _start_groups(settings, timedelta(minutes=timeout_minutes))
        _started = asked
    seed_everything(seed)


def _environment() -> tuple[int, int, int]:
    """(rank, world size, rank on this host) as torchrun tells them; (0, 1, 0) without it."""
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise InvalidArgument(
                explain(
                    "reading the ranks from the environment",
                    on=name,
                    expected="a whole number, as torchrun sets it",
                    found=repr(text),
                    do="start the ranks with torchrun, or unset it",
                )
            )
        values.append(int(text))
    rank, world_size, local_rank = values
    return rank, world_size, local_rank


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
        # Without these two the reductions of NCCL may take another path in another run.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        # TransformerEngine's attention asks for it in this way; Megatron wants it said.
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.backends.cudnn.benchmark = False


def _start_groups(settings: ParallelSettings, timeout: timedelta) -> None:
    global _own_world
    if not dist.is_initialized():
        _start_world(timeout)
        _own_world = True
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=settings.num_virtual_stages_per_pipeline_rank,
            context_parallel_size=settings.context_parallel_size,
            expert_model_parallel_size=settings.expert_model_parallel_size,
            expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )


def _start_world(timeout: timedelta) -> None:
    rank, world_size, local_rank = _environment()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    if world_size != 1:
        raise InvalidArgument(
            explain(
                "starting the process groups",
                on="RANK, MASTER_ADDR and MASTER_PORT",
                expected=f"where to meet the other ranks, with WORLD_SIZE {world_size}",
                found="not set",
                do="start the ranks with torchrun",
            )
        )
    # torch exports HashStore without telling its type stubs.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=1, timeout=timeout)


def seed_everything(seed: int) -> None:
    """Set torch's generators and Megatron's tracked ones to a state that depends on `seed`, the
    layout and the rank alone.

    As Megatron's training does, each pipeline stage has a seed of its own, and its tracker holds
    one state that is common to a tensor-parallel group and others that are not. Without CUDA, the
    tracker is the one for inference, which holds no state: dropout is 0.
    """
    # Megatron adds offsets of some thousands; numpy-style seeds end at 2**32.
    stage = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        stage % (2**31),
        inference_rng_tracker=not torch.cuda.is_available(),
        force_reset_rng=True,
    )
    torch.manual_seed(seed)


def shutdown() -> None:
    """End the process groups; after it `initialize` may be called with another layout.

    A world that `initialize` found and did not start stays.
    """
    global _started, _own_world
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if _own_world and dist.is_initialized():
        dist.destroy_process_group()
    _started, _own_world = None, False


def determinism_report() -> dict[str, Any]:
    """What decides the bits of a step in this process, for the record of a run."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "device": str(device()),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "megatron_core": megatron_version,
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
