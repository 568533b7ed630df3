"""A store in this process's memory: for tests, and for trying things out. Nothing survives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain
from ledger.hashing import file_hash
from ledger.storage.paths import require_folder, require_path
from ledger.storage.protocol import Staged, Stamp

__all__ = ["MemoryStore"]

_SCHEME = "memory://"


class _Place:
    """What lies under one name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[Stamp, pa.Buffer]] = {}
        self.identities = itertools.count()


_places: dict[str, _Place] = {}
_places_lock = threading.Lock()


class MemoryStore:
    """memory://NAME: all stores of one name in one process are one place, until `forget`.

    It keeps every promise of ObjectStore but durability. A forked child has a copy of its own.
    """

    root = None

    def __init__(self, uri: str) -> None:
        """Raises: InvalidArgument, where the URI does not begin with memory:// or has no name."""
        name = uri.removeprefix(_SCHEME).strip("/")
        if not uri.startswith(_SCHEME) or not name:
            raise InvalidArgument(
                explain("a place in memory cannot be read", on=repr(uri), expected="memory://NAME")
            )
        self.uri = f"{_SCHEME}{name}"
        with _places_lock:
            self._place = _places.setdefault(name, _Place())

    @staticmethod
    def forget(uri: str) -> None:
        """Let go of everything under a name. Stores that are open keep what they have."""
        with _places_lock:
            _places.pop(uri.removeprefix(_SCHEME).strip("/"), None)

    def stage(self, objects: Sequence[tuple[str, Sequence[Any]]]) -> list[Staged]:
        """See ObjectStore. Only remembers the bytes."""
        staged = []
        for folder, pieces in objects:
            require_folder(folder)
            done: Future[Any] = Future()
            done.set_result(None)
            staged.append(Staged(folder, pieces, done))
        return staged

    def publish(self, objects: Sequence[tuple[str, Staged]]) -> None:
        """See ObjectStore."""
        for path, staged in objects:
            require_path(path)
            self._create(path, b"".join(staged.pieces))

    def discard(self, staged: Sequence[Staged]) -> None:
        """See ObjectStore. Nothing was stored."""

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore."""
        staged = self.stage([("", [data]) for _, data in objects])
        self.publish(list(zip((path for path, _ in objects), staged, strict=True)))

    def put_hashed(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore."""
        self.put(objects)

    def stamp(self, path: str) -> Stamp:
        """See ObjectStore."""
        return self._found(path)[0]

    def read(self, path: str) -> pa.Buffer:
        """See ObjectStore."""
        return self._found(path)[1]

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See ObjectStore."""
        require_folder(prefix)
        with self._place.lock:
            paths = sorted(path for path in self._place.objects if path > after)
        return (path for path in paths if not prefix or path.startswith(prefix + "/"))

    def delete(self, path: str) -> None:
        """See ObjectStore."""
        require_path(path)
        with self._place.lock:
            self._place.objects.pop(path, None)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """See ObjectStore. An interrupted write leaves nothing here."""
        return ()

    def close(self) -> None:
        """The objects stay."""

    def _create(self, path: str, data: bytes) -> None:
        with self._place.lock:
            there = self._place.objects.get(path)
            if there is not None and there[1].to_pybytes() != data:
                raise Corrupt(
                    explain(
                        "an object was not stored, because its name is taken by other bytes",
                        on=f"{self.uri}/{path}",
                        expected=f"blake3 {file_hash(data).hex()}",
                        found=f"blake3 {file_hash(there[1]).hex()}",
                    )
                )
            identity = next(self._place.identities) if there is None else there[0].identity
            stamp = Stamp(len(data), time.time_ns(), identity)
            self._place.objects[path] = (stamp, pa.py_buffer(data))

    def _found(self, path: str) -> tuple[Stamp, pa.Buffer]:
        require_path(path)
        with self._place.lock:
            if path in self._place.objects:
                return self._place.objects[path]
        raise NotFound(explain("an object was not found", on=f"{self.uri}/{path}"))
