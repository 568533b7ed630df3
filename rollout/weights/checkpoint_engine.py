"""Weights to the GPUs of an engine through checkpoint-engine: CUDA IPC on the engine's host.

checkpoint-engine (github.com/MoonshotAI/checkpoint-engine) keeps one process beside each GPU of the
engine. They read the tensors, broadcast them among themselves, and hand each GPU a buffer that the
engine's process opens by its IPC handle: `/update_weights_from_ipc`. The processes are started for
an update by torchrun (`python -m rollout.weights.checkpoint_engine`), with the engine's own GPUs,
and read what the disk transport has written.

Needs CUDA and `pip install checkpoint-engine` here and in the engine's environment. It has not been
run: tests/gpu/test_weights.py is the test that would.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.weights.control import EngineInfo
from rollout.weights.staged import StagedVersion
from rollout.weights.transports import Delivery, DiskTransport, Outcome, label_only, to_each

__all__ = ["CheckpointEngineTransport", "gpus_of", "main"]


class CheckpointEngineTransport:
    """For engines of this host, each on GPUs of its own."""

    name = "checkpoint_engine"

    def __init__(self, files: DiskTransport, timeout_s: float) -> None:
        """`files` writes the tensors; `timeout_s`: for one engine."""
        self._files = files
        self._timeout_s = timeout_s

    async def send(
        self,
        deliveries: Sequence[Delivery],
        staged: StagedVersion,
        names: Sequence[str],
        *,
        flush: bool,
    ) -> list[Outcome]:
        """See `Transport.send`."""
        if not names:
            return await to_each(deliveries, lambda one: label_only(one.engine, staged))
        async with self._files.written(staged, names) as folder:
            return await to_each(
                deliveries, lambda one: self._run(one, folder, staged.version, flush)
            )

    async def close(self) -> None:
        """Nothing is held."""

    async def _run(self, one: Delivery, folder: Path, version: int, flush: bool) -> str | None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(one.tp_size), "-m", __name__),
            *("--folder", str(folder), "--engine", one.engine.address),
            *("--weight-version", str(version), "--timeout-s", str(self._timeout_s)),
            *(("--flush-cache",) if flush else ()),
        ]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, one.gpus))},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"checkpoint-engine did not end within {self._timeout_s:g} s"
        if process.returncode == 0:
            return None
        lines = said.decode(errors="replace").strip().splitlines()[-5:]
        return f"checkpoint-engine ended with {process.returncode}: " + " | ".join(lines)


def gpus_of(info: EngineInfo) -> tuple[int, ...]:
    """The numbers of an engine's GPUs on its host, as it was told to take them."""
    first = int(info.arguments.get("base_gpu_id", 0))
    step = int(info.arguments.get("gpu_id_step", 1))
    return tuple(first + step * number for number in range(info.tp_size))


def main(argv: Sequence[str] | None = None) -> int:
    """One of checkpoint-engine's processes: torchrun gives it its rank."""
    parser = argparse.ArgumentParser(prog="rollout.weights.checkpoint_engine")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--flush-cache", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    args = parser.parse_args(argv)
    from checkpoint_engine.ps import ParameterServer

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    files = sorted(str(path) for path in args.folder.glob("*.safetensors"))
    name = f"version-{args.weight_version}"
    server = ParameterServer(auto_pg=True)
    server.register_checkpoint(name, files=files[rank::world], named_tensors={})
    server.init_process_group()
    server.gather_metas(name)
    server.update(name, _ask(rank, args))
    server.unregister_checkpoint(name)
    return 0


def _ask(rank: int, args: argparse.Namespace) -> Callable[[list[tuple[str, str]]], None]:
    """What checkpoint-engine calls with the handle of each GPU: rank 0 tells the engine."""
    import httpx

    def ask(handles: list[tuple[str, str]]) -> None:
        if rank:
            return
        answer = httpx.post(
            f"{args.engine}/update_weights_from_ipc",
            json={
                "zmq_handles": dict(handles),
                "flush_cache": args.flush_cache,
                "weight_version": args.weight_version,
            },
            timeout=args.timeout_s,
        )
        if answer.status_code != 200:
            raise RuntimeError(f"/update_weights_from_ipc: {answer.status_code}: {answer.text}")

    return ask


if __name__ == "__main__":
    sys.exit(main())
