"""Lets the unchanged SGLang of `.venv-sglang` serve on a CPU; see ../README.md.

A line in `.venv-sglang/**/site-packages/sglang_on_cpu.pth` imports this module whenever that
environment's Python starts, so that every process of an engine has it, those that SGLang spawns
too, whoever starts the engine. Nothing is imported here: changes are made when SGLang imports the
module that they are for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["install"]

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # torch.compile of two small functions would call a C++ compiler and takes minutes.
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


def _torchvision_schemas() -> None:
    """Declare two operators whose code PyPI's torchvision cannot load without CUDA's libraries.

    torchvision registers shapes for them without asking whether they are there.
    """
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def _host_memory_needs_no_cuda(module: ModuleType) -> None:
    """Routed experts are collected in host memory, which is registered with CUDA: not here."""
    module._cuda_host_register = lambda *_arguments, **_options: None  # type: ignore[attr-defined]


def _torch_native_may_be_deterministic(module: ModuleType) -> None:
    """`--enable-deterministic-inference` refuses every attention backend that a CPU has.

    It would also switch the prefix cache off, which is part of what is tested.
    """
    module.add_deterministic_attention_backend_choices(["torch_native"])
    module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _no_batch_invariant_kernels(module: ModuleType) -> None:
    """They are Triton kernels. The flag then means seeds, not bits independent of the batch."""

    def skipped(*_arguments: object, **_options: object) -> None:
        print("sglang_on_cpu: no batch-invariant kernels on a CPU; seeds only", flush=True)

    module.enable_batch_invariant_mode = skipped  # type: ignore[attr-defined]


_BEFORE: dict[str, Callable[[], None]] = {"torchvision": _torchvision_schemas}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _host_memory_needs_no_cuda,
    "sglang.srt.arg_groups.choices": _torch_native_may_be_deterministic,
    "sglang.srt.batch_invariant_ops": _no_batch_invariant_kernels,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Leaves finding to the others, and does what belongs before or after a module's execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        before, after = _BEFORE.get(name), _AFTER.get(name)
        if before is None and after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            raise ImportError(f"sglang_on_cpu: {name} is expected in this environment", name=name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if before is not None:
                before()
            execute(module)
            if after is not None:
                after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Set what the environment does not set itself, and watch for the modules to change."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder())
