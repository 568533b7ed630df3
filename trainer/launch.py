"""Starting the ranks of a command from one command line, and what its end means.

`torchrun` is torch's own launcher in this process: an agent that starts one process a rank of the
same command, watches them, and ends all of them when one fails. `ray` is in `trainer.launch_ray`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ledger.errors import InvalidArgument, explain

__all__ = ["LAUNCHERS", "RanksNeeded", "end_code", "start_ranks"]

LAUNCHERS = ("torchrun", "ray")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How many ranks, and who starts them."""

    nodes: int
    per_node: int
    launcher: str
    device: str | None = None
    """On Ray: 'gpu' or 'cpu', as a layout says; None: GPUs where the cluster has any."""


class RanksNeeded(InvalidArgument):
    """The layout needs several ranks, and this process is the only one.

    A command line starts them then (`plan` says how); whoever calls in a program is told to.
    """

    def __init__(self, plan: RankPlan) -> None:
        super().__init__(
            explain(
                "training on several ranks",
                expected=f"{plan.nodes * plan.per_node} processes of the command",
                found="one",
                do="use the command line, which starts them, or torchrun",
            )
        )
        self.plan = plan

    def __reduce__(self) -> tuple[type[RanksNeeded], tuple[RankPlan]]:
        return RanksNeeded, (self.plan,)


def start_ranks(plan: RankPlan, module: str, argv: Sequence[str]) -> int:
    """Run `python -m module argv…` as every rank; returns the exit status of the command.

    That is 0, or what the first rank that failed ended with; it has said why on standard error, and
    the others were ended. Raises InvalidArgument where these ranks cannot be started from here,
    MissingDependency without the launcher's package.
    """
    _check_devices(plan)
    if plan.launcher == "ray":
        from trainer.launch_ray import start_on_ray

        return start_on_ray(plan.nodes, plan.per_node, module, argv, device=plan.device)
    if plan.nodes != 1:
        raise InvalidArgument(
            explain(
                "starting the ranks",
                on=f"--actor-num-nodes {plan.nodes} --launcher torchrun",
                expected="1: this command starts processes on its own host only",
                found=plan.nodes,
                do=f"on each host: torchrun --nnodes {plan.nodes} --nproc-per-node "
                f"{plan.per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m {module} …; "
                "or --launcher ray",
            )
        )
    return _torchrun(plan.per_node, module, argv)


def _check_devices(plan: RankPlan) -> None:
    import torch

    found = torch.cuda.device_count()
    if plan.launcher == "torchrun" and 0 < found < plan.per_node:
        raise InvalidArgument(
            explain(
                "starting the ranks",
                on=f"--actor-num-gpus-per-node {plan.per_node}",
                expected=f"at most the {found} CUDA devices of this host",
                found=plan.per_node,
            )
        )


def _torchrun(size: int, module: str, argv: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The rank that failed has said why; torch's own report would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for name in ("multiprocessing.api", "agent.server.api", "multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=module,
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return end_code(rank, failure.exitcode)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def end_code(rank: int, code: int) -> int:
    """The exit status for a rank that ended with `code`, or, below zero, by a signal."""
    if code >= 0:
        return code
    print(f"rank {rank} was ended by signal {-code}; the others were ended too", file=sys.stderr)
    return 128 - code
