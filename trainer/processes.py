"""This process as one of several ranks: how it joins them, and how it hears what rank 0 decided.

Rank 0 alone has the rollout side and writes to the ledger. What it decides (where the run stands,
which samples come next, up to which event the others must see) reaches the others through the
store that the ranks met in, not through a collective: a rollout may take longer than any timeout of
one, and a rank that waits must notice that rank 0 has failed. With one process every function here
is the identity.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ledger.errors import InvalidArgument, StorageFailed, explain

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = [
    "ElsewhereFailed",
    "as_launched",
    "claim_failure",
    "failure_code",
    "from_writer",
    "is_launched",
    "is_writer",
    "join_ranks",
    "leave_ranks",
    "wait_for_head",
    "wait_for_others",
]

_T = TypeVar("_T")
_LOOK_S = 0.25
"""How often at least a rank that waits looks whether what it waits for is there, or has failed."""
_CODE_S = 5.0
"""How long a rank that fails may take to say what it ends with."""
_HEAD_S = 60.0
"""How long events may take to show in the catalog of another rank after their commit."""

_store: Any = None
_decisions = 0
_joined = 0
_own_world = False


class ElsewhereFailed(Exception):
    """Another rank failed and says why; this one has nothing to add."""


def is_launched() -> bool:
    """Whether a launcher (torchrun, ours, Ray) made this process one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def as_launched(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the number of ranks that the launcher has started.

    Raises InvalidArgument where the options ask for another number.
    """
    if not is_launched():
        return dict(explicit)
    world = int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    nodes = max(1, world // max(here, 1))
    asked = (explicit.get("actor_num_nodes"), explicit.get("actor_num_gpus_per_node"))
    if asked != (None, None) and (asked[0] or 1) * (asked[1] or 1) != world:
        raise InvalidArgument(
            explain(
                "starting the ranks",
                on="--actor-num-nodes × --actor-num-gpus-per-node",
                expected=f"{world}, the ranks that the launcher has started (WORLD_SIZE)",
                found=f"{asked[0] or 1} × {asked[1] or 1}",
                do="leave the options out where torchrun starts the ranks",
            )
        )
    return {**explicit, "actor_num_nodes": nodes, "actor_num_gpus_per_node": world // nodes}


def join_ranks(timeout_minutes: float) -> None:
    """Meet the other ranks, where a launcher has started several. Idempotent.

    A world that is there already is used as it is. A collective that waits longer than
    `timeout_minutes` for another rank raises torch's error.
    """
    global _store, _joined, _own_world
    if not is_launched() or int(os.environ["WORLD_SIZE"]) == 1 or _store is not None:
        return
    import torch
    import torch.distributed as dist

    prefix = dist.PrefixStore  # type: ignore[attr-defined]  # exported, but not to type checkers
    _own_world = not dist.is_initialized()
    if _own_world:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        timeout = timedelta(minutes=timeout_minutes)
        meeting = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]
        store, rank, world_size = next(meeting)
        dist.init_process_group(
            # Objects and small things travel over gloo on GPUs too.
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=prefix("world", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    else:
        store = dist.distributed_c10d._get_default_store()
    _joined += 1
    _store = prefix(f"ledger-{_joined}", store)


def leave_ranks() -> None:
    """Leave the other ranks, once all work is done; ends the world that `join_ranks` started."""
    global _store, _decisions
    if _store is None:
        return
    import torch.distributed as dist

    _store, _decisions = None, 0
    if _own_world and dist.is_initialized():
        dist.destroy_process_group()


def is_writer() -> bool:
    """Whether this rank decides and writes: rank 0, or the only process."""
    return _store is None or int(os.environ["RANK"]) == 0


def from_writer(value: _T) -> _T:
    """What rank 0 gives here, on every rank, however long it takes; others' values are ignored.

    It is pickled. Every rank must call it at the same places. Raises ElsewhereFailed where a rank
    has failed meanwhile.
    """
    global _decisions
    if _store is None:
        return value
    _decisions += 1
    key = f"decision-{_decisions}"
    if is_writer():
        _store.set(key, pickle.dumps(value))
        return value
    _wait(key)
    decided: _T = pickle.loads(_store.get(key))
    return decided


def wait_for_others(name: str) -> None:
    """Return once every rank has come here; rank 0 then knows that none needs its store any more.

    Raises ElsewhereFailed.
    """
    if _store is None:
        return
    if _store.add(f"{name}-count", 1) == int(os.environ["WORLD_SIZE"]):
        _store.set(f"{name}-all", b"1")
    _wait(f"{name}-all")
    if not is_writer():
        _store.add(f"{name}-gone", 1)
        return
    # The store may live in this process: it must not end before the others have read.
    while _store.add(f"{name}-gone", 0) < int(os.environ["WORLD_SIZE"]) - 1:
        if _store.check(["failed"]):
            raise ElsewhereFailed
        time.sleep(0.01)


def _wait(key: str) -> None:
    # Asked again and again: a wait of the store's own that runs out of time says so on stderr.
    pause_s = 0.002
    while not _store.check([key]):
        if _store.check(["failed"]):
            raise ElsewhereFailed
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LOOK_S)


def claim_failure(code: int) -> bool:
    """Whether this rank is the first to fail, and so the one that says why; `code` is what it will
    end with.

    True where nobody can be asked: better two reasons than none.
    """
    if _store is None:
        return True
    try:
        first = bool(_store.add("failed", 1) == 1)
        if first:
            _store.set("failed-code", str(code))
    except Exception:
        return is_writer()
    return first


def failure_code() -> int:
    """What the rank that failed first ends with, as do the others; 1 where it cannot be asked."""
    try:
        _store.wait(["failed-code"], timedelta(seconds=_CODE_S))
        return int(_store.get("failed-code"))
    except Exception:
        return 1


def wait_for_head(ledger: Ledger, run_id: str, seq: int) -> None:
    """Return once this process's view of the ledger has the run's events up to `seq`.

    Raises StorageFailed where they do not show within a minute.
    """
    until = time.monotonic() + _HEAD_S
    pause_s = 0.005
    while True:
        found = next((run.head_seq for run in ledger.runs() if run.run_id == run_id), 0)
        if found >= seq:
            return
        if time.monotonic() > until:
            raise StorageFailed(
                explain(
                    "waiting for what rank 0 has committed",
                    on=f"{ledger.uri}, run {run_id!r}, rank {os.environ.get('RANK', '0')}",
                    expected=f"events up to {seq}",
                    found=f"up to {found}",
                    do="every rank must see the ledger as it grows: a folder on one host, or "
                    "--catalog postgresql://… with a store that all hosts reach",
                )
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
