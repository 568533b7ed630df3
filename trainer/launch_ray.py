"""Starting the ranks of a command as Ray actors: one a rank, in a placement group.

Each actor has the environment that torchrun would give it and runs the command as torchrun's
process would, so that a rank is the same program whoever started it. The cluster is the one of
RAY_ADDRESS, or one that this command starts on its own host and ends again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from ledger.errors import InvalidArgument, MissingDependency, explain

__all__ = ["GROUP", "NAMESPACE", "start_on_ray"]

NAMESPACE = "ledger"
GROUP = "LEDGER_RAY_GROUP"
"""Environment variable with the name of a placement group that is there for the ranks already: a
bundle a host. Whoever shares devices with them made it."""
_DIED = 128 + 9
"""Exit status where a rank's process was ended."""

_PLACING_S = 120.0
"""How long a cluster may take to give what was asked for."""
_PASSED_ON = (
    *("LEDGER_", "OMP_", "PYTHON", "CUBLAS_", "NCCL_", "NVTE_", "TORCH", "TOKENIZERS_", "HF_"),
    # What opens the ledger's store and catalog, and the metrics' account.
    *("AWS_", "FSSPEC_", "PG", "WANDB_"),
)
"""Beginnings of the names of environment variables that the ranks get from this command."""


def start_on_ray(
    nodes: int, per_node: int, module: str, argv: Sequence[str], *, device: str | None = None
) -> int:
    """Run `python -m module argv…` as `nodes` × `per_node` ranks; returns the exit status.

    That is 0, or what the first rank that failed ended with (137 where its process was ended); what
    it printed last is then printed here, and the others are ended. `device` is as in `RankPlan`.
    Raises MissingDependency without Ray, InvalidArgument where the
    cluster has too little.
    """
    ray = _import_ray()
    own = "RAY_ADDRESS" not in os.environ
    options: dict[str, Any] = {"num_cpus": max(nodes * per_node, os.cpu_count() or 1)}
    # No dashboard, no metrics: a cluster of one command.
    ray.init(
        log_to_driver=True,
        logging_level="ERROR",
        namespace=NAMESPACE,
        **({**options, "include_dashboard": False} if own else {}),
    )
    try:
        return _run(ray, nodes, per_node, module, argv, device)
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            explain(
                "starting the ranks on Ray",
                on="--launcher ray",
                expected="the package ray",
                found=error,
                do='install it: pip install "trajectory-ledger[ray]"; or --launcher torchrun',
            )
        ) from error
    return ray


class _Rank:
    """One rank: a process of Ray's in which the command runs."""

    def address(self) -> tuple[str, int]:
        """Where the ranks can meet: this host's address, and a port that is free there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def run(
        self, environment: dict[str, str], folder: str, module: str, argv: list[str]
    ) -> tuple[int, str, str]:
        """Run the command: its exit status, what it printed, and the end of its errors."""
        os.environ.update(environment)
        os.chdir(folder)
        printed, errors = io.StringIO(), _Remembering(sys.stderr)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                code = int(importlib.import_module(module).main(argv))
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
        return code, printed.getvalue(), "".join(errors.last)


class _Remembering(io.TextIOBase):
    """Passes text on, and remembers the end of it."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self.last: deque[str] = deque(maxlen=200)

    def write(self, text: str) -> int:
        self.last.append(text)
        self._to.write(text)
        return len(text)

    def flush(self) -> None:
        self._to.flush()


def _run(
    ray: Any, nodes: int, per_node: int, module: str, argv: Sequence[str], device: str | None
) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    on_gpu = device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    group = _group(ray, nodes, per_node, {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1})
    remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(_Rank)
    actors = [
        remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank // per_node
            )
        ).remote()
        for rank in range(nodes * per_node)
    ]
    host, port = ray.get(actors[0].address.remote())
    passed_on = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    running = {}
    for rank, actor in enumerate(actors):
        environment = {
            **passed_on,
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes * per_node),
            # Ray shows each actor its own GPU alone, as device 0.
            "LOCAL_RANK": "0" if on_gpu else str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        running[actor.run.remote(environment, os.getcwd(), module, list(argv))] = rank
    return _watch(ray, running)


def _group(ray: Any, nodes: int, per_node: int, each: dict[str, int]) -> Any:
    """The placement group that is there for the ranks, or a new one: a bundle a host."""
    from ray.util.placement_group import (
        get_placement_group,
        placement_group,
        remove_placement_group,
    )

    if GROUP in os.environ:
        return get_placement_group(os.environ[GROUP])
    group = placement_group(
        [{name: count * per_node for name, count in each.items()} for _ in range(nodes)],
        strategy="PACK" if nodes == 1 else "STRICT_SPREAD",
    )
    if not group.wait(_PLACING_S):
        remove_placement_group(group)
        raise InvalidArgument(
            explain(
                "starting the ranks on Ray",
                expected=f"{nodes} hosts with {per_node} × {each} free each",
                found=f"a cluster with {ray.cluster_resources()}",
                do="lower --actor-num-nodes or --actor-num-gpus-per-node, or add hosts",
            )
        )
    return group


def _watch(ray: Any, running: dict[Any, int]) -> int:
    """Wait for all ranks, or for the first that fails."""
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        rank = running.pop(done)
        try:
            code, printed, errors = ray.get(done)
        except ray.exceptions.RayError as error:
            told = explain(
                "training on Ray",
                on=f"rank {rank}",
                expected="an actor that runs to its end",
                found=str(error).splitlines()[0],
                do="look at the host's memory and at Ray's logs; the same command goes on",
            )
            print(told, file=sys.stderr)
            return _DIED
        print(printed, end="")
        if code:
            print(errors, end="", file=sys.stderr)
            return int(code)
    return 0
