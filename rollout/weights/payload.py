"""Tensors as an SGLang engine on this host takes them: handles of shared memory, base64.

`/update_weights_from_tensor` unpickles, with an allow-list, a list of (name, tensor) whose storages
are handles of torch's shared memory. Under torch's 'file_descriptor' strategy a handle is answered
by a thread of the sending process, which the engine cannot reach; a handle of a named file works.
The strategy is a setting of the whole process, so it is left alone: the pickler here writes the
handles itself. SGLang need not be installed on this side.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ledger.errors import StorageFailed, explain
from rollout.weights.staged import bytes_of

__all__ = ["SharedChunk"]

_ALIGNMENT = 64
_PROTOCOL = 4


class SharedChunk:
    """Copies of some tensors in one block of shared memory, which lives as long as this object."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises StorageFailed where the host has not that much shared memory."""
        _start_manager()
        offsets, size = [], 0
        for tensor in tensors.values():
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            self._storage = torch.UntypedStorage._new_using_filename_cpu(max(size, 1))
        except RuntimeError as error:
            raise StorageFailed(
                explain(
                    "putting weights into shared memory",
                    on="/dev/shm",
                    expected=f"{size} bytes",
                    found=str(error).splitlines()[0],
                    do="give the container more (Docker's shm-size), lower "
                    "--update-weight-buffer-size, or use --update-weight-transport disk",
                )
            ) from error
        block = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self._views: list[tuple[str, Tensor]] = []
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True):
            place = block[offset : offset + tensor.nbytes]
            place.copy_(bytes_of(tensor))
            self._views.append((name, place.view(tensor.dtype).view(tensor.shape)))

    def payload(self) -> str:
        """For one process of an engine, which reads it once."""
        buffer = io.BytesIO()
        _Pickler(buffer, self._storage).dump(self._views)
        return base64.b64encode(buffer.getvalue()).decode()

    def payloads(self, count: int) -> Sequence[str]:
        """For each process of an engine."""
        return [self.payload() for _ in range(count)]


@functools.cache
def _start_manager() -> None:
    """Start torch's process that removes shared memory nobody has any more, with its standard error
    closed: it lives until the last engine that used some has ended, and whoever reads a pipe that
    this process writes to would wait as long."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        torch.UntypedStorage._new_using_filename_cpu(1)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _Pickler(pickle.Pickler):
    """Writes tensors of one storage as torch.multiprocessing does with named files."""

    def __init__(self, buffer: io.BytesIO, storage: torch.UntypedStorage) -> None:
        super().__init__(buffer, protocol=_PROTOCOL)
        self._storage = storage

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            typed = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=self._storage, dtype=found.dtype, _internal=True
            )
            metadata = (found.storage_offset(), tuple(found.shape), found.stride(), False)
            return reductions.rebuild_tensor, (Tensor, typed, metadata)
        if isinstance(found, torch.storage.TypedStorage):
            return reductions.rebuild_typed_storage, (self._storage, found.dtype)
        if isinstance(found, torch.UntypedStorage):
            manager, handle, size = found._share_filename_cpu_()
            found._shared_incref()  # type: ignore[no-untyped-call]  # the reader gives it back
            return reductions.rebuild_storage_filename, (
                torch.UntypedStorage,
                manager,
                handle,
                size,
            )
        return NotImplemented
