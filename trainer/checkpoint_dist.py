"""The sharded part of a checkpoint: Megatron's dist checkpointing of weights and optimizer state.

Format "torch_dist-1". Each rank writes the shards that it holds (`__<rank>_<n>.distcp`), and
`.metadata` says where in which tensor of the whole model each lies, so that any layout can read it:

    decoder.layers.…              weights, under Megatron's names
    optimizer.exp_avg.decoder.…   Adam's moments and, beside 16-bit weights, the main weights: in
                                  the shapes of the weights, also of a distributed optimizer

Everything else of the state is in files of `trainer.checkpoint`. Megatron pickles its metadata:
only files whose hash is as recorded may be read.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ledger.errors import Corrupt, explain
from trainer import cpu_shim
from trainer.megatron import parallel_state, unwrap
from trainer.optimizer_slots import slots_of
from trainer.state import TrainState

__all__ = ["Writing", "read_shards", "write_shards"]


def _megatron() -> Any:
    """Megatron's dist checkpointing, made to run without CUDA where there is none."""
    for name in ("torch", "async_utils", "filesystem_async", "state_dict_saver"):
        importlib.import_module(f"megatron.core.dist_checkpointing.strategies.{name}")
    cpu_shim.install()
    return importlib.import_module("megatron.core.dist_checkpointing")


class Writing:
    """Shards that background processes of all ranks are writing."""

    def __init__(self, request: Any) -> None:
        queues: Any = importlib.import_module(
            "megatron.core.dist_checkpointing.strategies.async_utils"
        )
        self._queue = queues.AsyncCallsQueue(persistent=False)
        self._queue.schedule_async_request(request)

    def is_done(self, *, wait: bool) -> bool:
        """Whether all ranks' shards and their metadata are written and synced. Collective.

        Raises what a writer raised.
        """
        with _no_advice():
            self._queue.maybe_finalize_async_calls(blocking=wait)
        return bool(self._queue.get_num_unfinalized_calls() == 0)

    def abandon(self) -> None:
        """End this rank's writers. What they wrote is incomplete."""
        for call in self._queue.async_calls:
            call.async_caller.close(abort=True)
        self._queue.async_calls.clear()


def write_shards(state: TrainState, folder: Path, *, in_background: bool) -> Writing | None:
    """Write this rank's shards into a folder that exists and is empty. Collective.

    In the background, the state may go on at once: what is written is what it was. The folder is
    complete once `Writing.is_done`; else on return, and None is returned.
    """
    dist_checkpointing = _megatron()
    sharded = _sharded(state, _held(state))
    if not in_background:
        with _no_advice():
            dist_checkpointing.save(sharded, str(folder))
        return None
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        # 0.19 would take a package of its own for it.
        options["async_strategy"] = "mcore"
    with _no_advice():
        return Writing(dist_checkpointing.save(sharded, str(folder), **options))


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Without torch's advice to Megatron that it should use other classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def read_shards(state: TrainState, folder: Path, *, step: int, kinds: list[str]) -> None:
    """Make weights and optimizer state of `state` what `write_shards` wrote. Collective.

    The layout may be another one than that which wrote. `kinds` are those of the optimizer's
    tensors that were written, `step` Adam's. Raises Corrupt where tensors are missing or have other
    shapes.
    """
    dist_checkpointing = _megatron()
    empty: dict[str, dict[str, Tensor]] = {
        kind: {
            key: torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for key, tensor in _trained(state).items()
        }
        for kind in kinds
    }
    try:
        with _no_advice():
            loaded = dist_checkpointing.load(_sharded(state, empty), str(folder))
    except Exception as error:
        raise Corrupt(
            explain(
                "reading a checkpoint",
                on=str(folder),
                expected="the tensors of this model, in Megatron's sharded format",
                found=f"{type(error).__name__}: {error}",
                do="check that the checkpoint belongs to the run's model",
            )
        ) from error
    with torch.no_grad():
        for number, chunk in enumerate(state.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=False)
        read = {
            kind: {key: loaded["optimizer"][kind][key] for key in of_kind}
            for kind, of_kind in empty.items()
        }
    state.load_local_moments(read, step)


def _trained(state: TrainState) -> dict[str, Tensor]:
    """The parameters of this rank by key, without kept buffers."""
    slots = slots_of(state.optimizer)
    return {key: t for key, t in state.placement.local.items() if id(t) in slots}


def _held(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """What this rank's optimizer keeps, by kind and key, in the shapes of the parameters.

    Collective over the copies of a parameter.
    """
    slots = slots_of(state.optimizer)
    return {
        kind: {key: slots[id(tensor)].whole(kind) for key, tensor in _trained(state).items()}
        for kind in state.kept_kinds()
    }


def _sharded(state: TrainState, held: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Megatron's sharded state dict of the weights, and of `held` beside them."""
    tools: Any = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(state.chunks)
    }
    trained = _trained(state)
    by_number = tools.get_param_id_to_sharded_param_map(model, iter(trained.values()))
    return {
        **model,
        "optimizer": {
            kind: {
                key: tools.make_sharded_optimizer_tensor(
                    by_number[number], of_kind[key], prefix=f"optimizer.{kind}"
                )
                for number, key in enumerate(trained)
            }
            for kind, of_kind in held.items()
        },
    }
