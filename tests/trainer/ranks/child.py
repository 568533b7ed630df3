"""One rank of a pair: runs checks until its connection closes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Client
from typing import Any


def main() -> None:
    """Arguments: rank, world size, address of the parent, path of the file store."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Client(sys.argv[3], "AF_UNIX") as connection:
        connection.send(int(sys.argv[1]))
        layout: Any = None
        while True:
            try:
                module, name, args, wanted, seed = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                if wanted is not None:
                    _lay_out(wanted, seed, again=wanted == layout)
                    layout = wanted
                check = reduce(getattr, name.split("."), importlib.import_module(module))
                answer = (True, check(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            try:
                said = pickle.dumps(answer)
            except Exception:
                said = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(said)


def _lay_out(layout: Any, seed: int, *, again: bool) -> None:
    import torch.distributed as dist

    from trainer import parallel

    if not dist.is_initialized():
        # Shorter than any deadline of a check: a rank that waits for one that failed says where.
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(sys.argv[4], int(sys.argv[2])),
            rank=int(sys.argv[1]),
            world_size=int(sys.argv[2]),
            timeout=timedelta(seconds=30),
        )
    if not again:
        parallel.shutdown()
        _end_groups()
    parallel.initialize(layout, seed=seed, num_threads=1, deterministic=True, timeout_minutes=0.5)


def _end_groups() -> None:
    """Megatron forgets its groups; their threads and sockets would stay to the end."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from trainer.megatron import DistributedDataParallel

    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Each group is three threads that wake up all the time, and models hold their groups. Hooks on
    # gradients hold Megatron's wrappers from within torch, where no collection finds the cycle.
    for wrapper in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
        wrapper.grad_accs.clear()
    gc.collect()


if __name__ == "__main__":
    main()
