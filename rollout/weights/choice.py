"""Which way the weights go to an engine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ledger.errors import InvalidArgument, explain
from rollout.weights.checkpoint_engine import CheckpointEngineTransport
from rollout.weights.control import EngineControl, EngineInfo
from rollout.weights.distributed import DistributedTransport
from rollout.weights.settings import WeightUpdateSettings
from rollout.weights.transports import DiskTransport, TensorTransport, Transport

__all__ = ["TransportChoice"]

_BROADCAST_TIMEOUT_S = 300.0
"""For one request's tensors. An engine that refuses instead of receiving keeps this process, and
the other engines, waiting so long."""


class TransportChoice:
    """One transport of each kind, made when an engine first needs it."""

    def __init__(self, settings: WeightUpdateSettings) -> None:
        """Nothing is made yet."""
        self._settings = settings
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._made: dict[str, Transport] = {}

    def of(self, engine: EngineControl, info: EngineInfo) -> Transport:
        """The one that was asked for, or, with 'auto', the one that reaches this engine.

        Raises InvalidArgument where it does not.
        """
        name = self._settings.transport
        if name == "auto":
            if engine.local:
                name = "tensor" if info.dp_size == 1 else "disk"
            else:
                name = "distributed" if self._settings.disk_dir is None else "disk"
        refused = self._unreachable(name, engine, info)
        if refused is not None:
            raise InvalidArgument(
                explain(
                    f"bringing weights to an engine by {name!r}",
                    on=engine.address,
                    expected="a way that reaches it",
                    found=refused,
                    do="name another --update-weight-transport, or a folder that both see with "
                    "--update-weight-disk-dir",
                )
            )
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    async def close(self) -> None:
        """Leave the group of a broadcast, and remove the temporary folder."""
        for transport in self._made.values():
            await transport.close()
        self._made = {}
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _unreachable(self, name: str, engine: EngineControl, info: EngineInfo) -> str | None:
        if name == "disk":
            if engine.local or self._settings.disk_dir is not None:
                return None
            return "an engine of another host, and no folder that both see"
        if info.dp_size > 1:
            return f"dp_size {info.dp_size}: SGLang takes weights of replicas from disk alone"
        if name in ("tensor", "checkpoint_engine") and not engine.local:
            return "an engine of another host: shared memory and IPC do not reach it"
        if name == "checkpoint_engine" and info.device == "cpu":
            return "an engine on the CPU: IPC handles are of CUDA memory"
        return None

    def _make(self, name: str) -> Transport:
        settings = self._settings
        if name == "tensor":
            return TensorTransport(settings.buffer_size)
        if name == "distributed":
            seconds = min(settings.timeout_s, _BROADCAST_TIMEOUT_S)
            return DistributedTransport(settings.buffer_size, seconds)
        folder = settings.disk_dir
        if folder is None:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="weights-")
            folder = Path(self._folder.name)
        disk = DiskTransport(
            folder,
            settings.buffer_size,
            keep_files=settings.disk_keep_files,
            read_back=settings.check == "files",
        )
        return disk if name == "disk" else CheckpointEngineTransport(disk, settings.timeout_s)
