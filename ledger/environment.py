"""Describes the environment that results depend on, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from ledger.redact import redact

__all__ = ["FLAGS", "PACKAGES", "describe_environment"]

PACKAGES = (
    "trajectory-ledger",
    "alembic",
    "blake3",
    "datasets",
    "duckdb",
    "flash-attn",
    "fsspec",
    "megatron-core",
    "numpy",
    "pyarrow",
    "ray",
    "reasoning-gym",
    "s3fs",
    "safetensors",
    "sglang",
    "sqlalchemy",
    "tokenizers",
    "torch",
    "transformer-engine",
    "transformers",
    "triton",
    "vllm",
)
"""Packages whose version is recorded where they are installed."""

FLAGS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TOKENIZERS_PARALLELISM",
)
"""Environment variables that change arithmetic, order or threads. No other variable is recorded."""

_GIT_TIMEOUT_S = 5.0


def describe_environment() -> dict[str, Any]:
    """JSON-ready facts about this process: python, packages, cpu, gpu driver, host, source, flags.

    Imports none of the packages (versions come from their metadata) and stores no secret. What
    cannot be found out here is None.
    """
    return redact(
        {
            "python": sys.version.split()[0],
            "implementation": platform.python_implementation(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "host": platform.node(),
            "cpu": _cpu_model(),
            "cpu_count": os.cpu_count(),
            "cpu_usable": _usable_cpus(),
            "memory_bytes": _memory_bytes(),
            "gpu_driver": _first_line(Path("/proc/driver/nvidia/version")),
            "packages": _packages(),
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
            "source": _source_revision(Path(__file__).resolve().parent),
        }
    )


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    for line in lines:
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _usable_cpus() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _source_revision(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that this package lies in, and whether it was changed since."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "changed": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
