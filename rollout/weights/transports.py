"""Ways of tensors to engines on one host or one file system: shared memory, and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file, save_file

from ledger.errors import EngineFailed, StorageFailed, explain
from rollout.weights.control import EngineControl
from rollout.weights.payload import SharedChunk
from rollout.weights.staged import StagedVersion, chunks, record_of

__all__ = [
    "Delivery",
    "DiskTransport",
    "Outcome",
    "TensorTransport",
    "Transport",
    "close_session",
    "go_on",
    "label_only",
    "open_session",
    "to_each",
]

Outcome = str | EngineFailed | None
"""Of one engine: it took everything (None), what it said when it did not, or that it is gone."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An engine that waits for tensors."""

    engine: EngineControl
    tp_size: int
    """Its processes; each is given its own handle."""
    device: str
    """'cpu' or 'cuda'."""
    gpus: tuple[int, ...] = ()
    """Their numbers on its host."""


class Transport(Protocol):
    """One way to bring tensors to engines that are paused."""

    name: str

    async def send(
        self,
        deliveries: Sequence[Delivery],
        staged: StagedVersion,
        names: Sequence[str],
        *,
        flush: bool,
    ) -> list[Outcome]:
        """Bring the tensors `names` of a version and its label to each engine; how it went.

        The label comes with the last of the bytes. With `flush` the prefix cache is emptied, which
        an engine refuses while requests are in its batch.
        """

    async def close(self) -> None:
        """Give back what is held between updates."""


async def to_each(
    deliveries: Sequence[Delivery], send: Callable[[Delivery], Awaitable[str | None]]
) -> list[Outcome]:
    """Send to all engines at a time. Raises what is not the fault of an engine."""

    async def one(delivery: Delivery) -> Outcome:
        try:
            return await send(delivery)
        except EngineFailed as error:
            return error

    return list(await asyncio.gather(*(one(delivery) for delivery in deliveries)))


async def label_only(engine: EngineControl, staged: StagedVersion) -> str | None:
    """Name a version that has the bits of the one before."""
    answer = await engine.post(
        "/update_weight_version",
        {"new_version": str(staged.version), "abort_all_requests": False},
    )
    return None if answer.ok else f"/update_weight_version answered {answer.message}"


async def open_session(engine: EngineControl) -> str | None:
    """Begin an update, where one that was left open is closed first."""
    answer = await engine.post("/begin_weight_update", {"selector": "all"})
    if not answer.ok and "already open" in answer.message:
        await engine.post("/end_weight_update")
        answer = await engine.post("/begin_weight_update", {"selector": "all"})
    return None if answer.ok else f"/begin_weight_update answered {answer.message}"


async def close_session(engine: EngineControl) -> str | None:
    """End an update."""
    answer = await engine.post("/end_weight_update")
    return None if answer.ok else f"/end_weight_update answered {answer.message}"


class TensorTransport:
    """Through the shared memory of one host, a chunk at a time."""

    name = "tensor"

    def __init__(self, buffer_size: int) -> None:
        """`buffer_size`: bytes of shared memory that are used at a time."""
        self._buffer_size = buffer_size

    async def send(
        self,
        deliveries: Sequence[Delivery],
        staged: StagedVersion,
        names: Sequence[str],
        *,
        flush: bool,
    ) -> list[Outcome]:
        """See `Transport.send`. Raises StorageFailed where there is too little shared memory."""
        if not names:
            return await to_each(deliveries, lambda one: label_only(one.engine, staged))
        outcomes = await to_each(deliveries, lambda one: open_session(one.engine))
        parts = list(chunks(staged, names, self._buffer_size))
        for number, part in enumerate(parts):
            if all(outcome is not None for outcome in outcomes):
                break
            tensors = {name: staged.tensors[name] for name in part}
            shared = await asyncio.to_thread(SharedChunk, tensors)
            last = number == len(parts) - 1

            async def send(
                one: Delivery, shared: SharedChunk = shared, last: bool = last
            ) -> str | None:
                answer = await one.engine.post(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": shared.payloads(one.tp_size),
                        "weight_version": str(staged.version) if last else None,
                        "flush_cache": flush and last,
                    },
                )
                return None if answer.ok else f"/update_weights_from_tensor: {answer.message}"

            outcomes = await go_on(deliveries, outcomes, send)

        return await go_on(deliveries, outcomes, lambda one: close_session(one.engine))

    async def close(self) -> None:
        """Nothing is held."""


async def go_on(
    deliveries: Sequence[Delivery],
    outcomes: Sequence[Outcome],
    send: Callable[[Delivery], Awaitable[str | None]],
) -> list[Outcome]:
    """`send` to the engines that everything went well with so far."""
    well = [i for i, outcome in enumerate(outcomes) if outcome is None]
    after = list(outcomes)
    found = await to_each([deliveries[i] for i in well], send)
    for i, outcome in zip(well, found, strict=True):
        after[i] = outcome
    return after


class DiskTransport:
    """Safetensors files in a folder that the engines see under the same path."""

    name = "disk"

    def __init__(
        self, folder: Path, buffer_size: int, *, keep_files: bool, read_back: bool = False
    ) -> None:
        """`folder` holds one folder a version; a file has about `buffer_size` bytes. With
        `read_back` the files are read again, and compared, before an engine hears of them."""
        self._folder = folder
        self._buffer_size = buffer_size
        self._keep_files = keep_files
        self._read_back = read_back

    async def send(
        self,
        deliveries: Sequence[Delivery],
        staged: StagedVersion,
        names: Sequence[str],
        *,
        flush: bool,
    ) -> list[Outcome]:
        """See `Transport.send`. Raises StorageFailed where the files cannot be written."""
        if not names:
            return await to_each(deliveries, lambda one: label_only(one.engine, staged))

        async def send(one: Delivery, folder: Path) -> str | None:
            answer = await one.engine.post(
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "load_format": "auto",
                    "weight_version": str(staged.version),
                    "flush_cache": flush,
                },
            )
            return None if answer.ok else f"/update_weights_from_disk: {answer.message}"

        async with self.written(staged, names) as folder:
            return await to_each(deliveries, lambda one: send(one, folder))

    @contextlib.asynccontextmanager
    async def written(self, staged: StagedVersion, names: Sequence[str]) -> AsyncIterator[Path]:
        """A folder that holds these tensors, for as long as it is read (or for good, where files
        are kept). Raises StorageFailed."""
        folder = await asyncio.to_thread(self._write, staged, names)
        try:
            yield folder
        finally:
            if not self._keep_files:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """Nothing is held."""

    def _write(self, staged: StagedVersion, names: Sequence[str]) -> Path:
        """The folder, whole and durable under its name: an engine dies of a file cut short."""
        whole = len(names) == len(staged.tensors)
        folder = self._folder / f"weight_v{staged.version:06d}{'' if whole else '_delta'}"
        making = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            parts = list(chunks(staged, names, self._buffer_size))
            weight_map = {}
            for number, part in enumerate(parts, 1):
                file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
                save_file(
                    {name: staged.tensors[name] for name in part},
                    making / file,
                    metadata={"format": "pt"},
                )
                weight_map.update(dict.fromkeys(part, file))
            index = {"metadata": {"total_size": staged.size_bytes(names)}, "weight_map": weight_map}
            (making / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
            for path in (*making.iterdir(), making):
                _sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            making.rename(folder)
            _sync(self._folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(making)
            raise StorageFailed(
                explain(
                    "writing weights for the engines",
                    on=str(folder),
                    expected=f"room for {staged.size_bytes(names)} bytes",
                    found=error,
                    do="make room, or name another folder with --update-weight-disk-dir",
                )
            ) from error
        if self._read_back:
            _compare_files(folder, staged, names)
        return folder


def _compare_files(folder: Path, staged: StagedVersion, names: Sequence[str]) -> None:
    """Raises StorageFailed where a tensor in the files is not the staged one."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[name] = record_of(name, tensor)
    for name in names:
        if found.get(name) != staged.records[name]:
            raise StorageFailed(
                explain(
                    "writing weights for the engines",
                    on=f"{folder}, tensor {name}",
                    expected="the tensor that was written",
                    found="another one" if name in found else "none",
                    do="check the disk, or name another folder with --update-weight-disk-dir",
                )
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
