"""The Ray cluster that a command uses: the one of RAY_ADDRESS, or one that it starts and ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ledger.errors import InvalidArgument, MissingDependency, StorageFailed, explain

__all__ = ["GROUP", "PASSED_ON", "cluster", "environment", "import_ray", "reserve", "reserved"]

NAMESPACE = "ledger"
"""Of the names in the cluster, the same for all commands."""
GROUP = "LEDGER_RAY_GROUP"
"""Environment variable with the name of the placement group of the trainer's ranks, for engines
that share their devices."""
PLACING_S = 120.0
"""How long a cluster may take to give what was asked for."""
PASSED_ON = (
    *("LEDGER_", "OMP_", "PYTHON", "CUBLAS_", "NCCL_", "NVTE_", "TORCH", "TOKENIZERS_", "HF_"),
    *("AWS_", "FSSPEC_", "PG", "SGLANG_"),
)
"""Beginnings of the names of environment variables that actors get from the command."""


def import_ray() -> Any:
    """The package. Raises MissingDependency."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            explain(
                "using Ray",
                on="--launcher ray",
                expected="the package ray",
                found=error,
                do='install it: pip install "trajectory-ledger[ray]"',
            )
        ) from error
    return ray


def environment() -> dict[str, str]:
    """What actors get of this process's environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


@contextmanager
def cluster(needed: Mapping[str, float]) -> Iterator[Any]:
    """Ray, connected. A cluster that is started here has at least the processor cores `needed`.

    Raises MissingDependency without Ray, StorageFailed where it does not start or answer,
    InvalidArgument where the cluster has too little.
    """
    ray = import_ray()
    own = "RAY_ADDRESS" not in os.environ
    options: dict[str, Any] = {
        "log_to_driver": True,
        "logging_level": "ERROR",
        "namespace": NAMESPACE,
    }
    if own:
        cores = max(int(needed.get("CPU", 0)), os.cpu_count() or 1)
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no class for a cluster that does not start
        raise StorageFailed(
            explain(
                "starting Ray" if own else "connecting to Ray",
                on=os.environ.get("RAY_ADDRESS", "a cluster on this host"),
                expected="a cluster within 30 s",
                found=str(error).splitlines()[0],
                do="the same command goes on when the host, or RAY_ADDRESS, can be reached; its "
                "load and /tmp/ray/session_latest/logs say more",
            )
        ) from error
    try:
        there = ray.cluster_resources()
        short = {name: n for name, n in needed.items() if there.get(name, 0) < n}
        if short:
            raise InvalidArgument(
                explain(
                    "placing a layout on Ray",
                    expected="at least "
                    + ", ".join(f"{n:g} {name}" for name, n in sorted(short.items())),
                    found=", ".join(f"{there.get(name, 0):g} {name}" for name in sorted(short))
                    + " in the whole cluster",
                    do='lower the numbers in the layout, add hosts, or say device = "cpu"',
                )
            )
        yield ray
    finally:
        ray.shutdown()


def reserve(
    ray: Any, bundles: Sequence[Mapping[str, float]], strategy: str, *, name: str | None = None
) -> Any:
    """A placement group of these bundles; with a name it is there for other commands, too.

    It ends with this process. Raises InvalidArgument where it cannot be had in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [dict(bundle) for bundle in bundles], strategy=strategy, name=name or ""
    )
    if not group.wait(PLACING_S):
        remove_placement_group(group)
        raise InvalidArgument(
            explain(
                "placing a layout on Ray",
                on=f"strategy {strategy}",
                expected=", ".join(str(dict(bundle)) for bundle in bundles),
                found=f"a cluster with {ray.available_resources()} free",
                do="lower the numbers in the layout, or add hosts",
            )
        )
    return group


def reserved() -> Any:
    """The placement group of the trainer's ranks that `GROUP` names; None without a name."""
    from ray.util.placement_group import get_placement_group

    return get_placement_group(os.environ[GROUP]) if GROUP in os.environ else None
