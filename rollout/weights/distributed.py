"""A broadcast from this process to every process of the engines: NCCL; on the CPU gloo."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch import distributed as dist

from ledger.errors import EngineFailed, explain
from rollout.weights.control import EngineControl
from rollout.weights.staged import StagedVersion, chunks
from rollout.weights.transports import (
    Delivery,
    Outcome,
    close_session,
    go_on,
    label_only,
    open_session,
    to_each,
)

__all__ = ["DistributedTransport"]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """This process as rank 0, and the processes of some engines after it."""

    name: str
    members: tuple[EngineControl, ...]
    """The engines, in the order of their ranks."""
    ranks: Any
    """torch's process group."""
    store: Any
    """Where its members meet: lives as long as the group."""


class DistributedTransport:
    """One broadcast of each tensor, whatever the number of engines.

    The group is made at the first update, and again when other engines take part or when one of
    them failed. What an engine receives it loads at once.
    """

    name = "distributed"

    def __init__(self, buffer_size: int, timeout_s: float) -> None:
        """`buffer_size`: bytes of one request. `timeout_s`: for one broadcast, after which the
        group is given up."""
        self._buffer_size = buffer_size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: _Group | None = None

    async def send(
        self,
        deliveries: Sequence[Delivery],
        staged: StagedVersion,
        names: Sequence[str],
        *,
        flush: bool,
    ) -> list[Outcome]:
        """See `Transport.send`. One engine that fails is a failure of all: they were to receive
        the same broadcast."""
        if not names:
            return await to_each(deliveries, lambda one: label_only(one.engine, staged))
        group, outcomes = await self._join(deliveries)
        if group is None:
            return outcomes
        outcomes = await to_each(deliveries, lambda one: open_session(one.engine))
        parts = list(chunks(staged, names, self._buffer_size))
        for number, part in enumerate(parts):
            if any(outcome is not None for outcome in outcomes):
                await self.close()
                return _of_all(outcomes)
            last = number == len(parts) - 1
            request = {
                "names": part,
                "dtypes": [staged.records[name].dtype for name in part],
                "shapes": [list(staged.records[name].shape) for name in part],
                "group_name": group.name,
                "weight_version": str(staged.version) if last else None,
                "flush_cache": flush and last,
            }

            async def take(one: Delivery, request: dict[str, Any] = request) -> str | None:
                answer = await one.engine.post("/update_weights_from_distributed", request)
                return None if answer.ok else f"/update_weights_from_distributed: {answer.message}"

            tensors = [staged.tensors[name] for name in part]
            taken, failed = await asyncio.gather(
                to_each(deliveries, take),
                asyncio.to_thread(_broadcast, group.ranks, tensors, deliveries[0].device),
            )
            outcomes = [one or failed for one in taken]
        outcomes = await go_on(deliveries, outcomes, lambda one: close_session(one.engine))
        if any(outcome is not None for outcome in outcomes):
            await self.close()
        return _of_all(outcomes)

    async def _join(self, deliveries: Sequence[Delivery]) -> tuple[_Group | None, list[Outcome]]:
        members = tuple(one.engine for one in deliveries)
        if self._group is not None and self._group.members == members:
            return self._group, [None] * len(members)
        await self.close()
        name = f"weights-{secrets.token_hex(8)}"
        world = 1 + sum(one.tp_size for one in deliveries)
        host = _address_towards(deliveries[0].engine)
        backend = "gloo" if deliveries[0].device == "cpu" else "nccl"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, world, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        first = {}
        rank = 1
        for one in deliveries:
            first[one.engine.address] = rank
            rank += one.tp_size

        async def join(one: Delivery) -> str | None:
            answer = await one.engine.post(
                "/init_weights_update_group",
                {
                    "master_address": host,
                    "master_port": store.port,
                    "rank_offset": first[one.engine.address],
                    "world_size": world,
                    "group_name": name,
                    "backend": backend,
                },
            )
            return None if answer.ok else f"/init_weights_update_group: {answer.message}"

        outcomes, ranks = await asyncio.gather(
            to_each(deliveries, join),
            asyncio.to_thread(_make_group, backend, store, world, name, self._timeout),
        )
        failed = ranks if isinstance(ranks, str) else None
        if failed is not None or any(outcome is not None for outcome in outcomes):
            return None, _of_all([one or failed for one in outcomes])
        self._group = _Group(name, members, ranks, store)
        return self._group, outcomes

    async def close(self) -> None:
        """Give the group up. Engines that are gone need not hear of it."""
        group, self._group = self._group, None
        if group is None:
            return

        async def leave(engine: EngineControl) -> None:
            with contextlib.suppress(EngineFailed):
                await engine.post("/destroy_weights_update_group", {"group_name": group.name})

        await asyncio.gather(*(leave(engine) for engine in group.members))


def _make_group(backend: str, store: Any, world: int, name: str, timeout: timedelta) -> Any:
    """A process group beside the trainer's own, as the engines make theirs; or what went wrong.

    torch makes groups in public only among the ranks of one default group, of which the engines
    are none.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        ranks, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        return f"making the group {name} of {world} ranks: {error}"
    return ranks


def _broadcast(ranks: Any, tensors: Sequence[Tensor], device: str) -> str | None:
    """From rank 0. Returns what went wrong."""
    try:
        for tensor in tensors:
            sent = tensor if device == "cpu" else tensor.to("cuda", non_blocking=True)
            ranks.broadcast(sent, 0).wait()
        if device != "cpu":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"broadcasting: {str(error).splitlines()[0]}"
    return None


def _of_all(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Engines that heard nothing wrong share the failure of the others."""
    bad = [outcome for outcome in outcomes if outcome is not None]
    if not bad:
        return list(outcomes)
    return [
        f"another engine of the broadcast failed: {bad[0]}" if outcome is None else outcome
        for outcome in outcomes
    ]


def _address_towards(engine: EngineControl) -> str:
    """This host's address, as an engine's host sees it."""
    parts = urlsplit(engine.address)
    if engine.local:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname or "", parts.port or 80))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineFailed(
            explain(
                "finding this host's address",
                on=engine.address,
                expected="a way to the engine's host",
                found=error,
            )
        ) from error
