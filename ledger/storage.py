"""Where bytes lie: a small protocol, and the local directory that implements it.

A path is relative to the store's root, with '/' between its parts. An object is written once,
whole, and never changed. Errors of the world below (a full disk, a read-only mount) come out as
StorageFailed, a missing object as NotFound.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from ledger.errors import Corrupt, NotFound, StorageFailed, explain
from ledger.hashing import file_hash

__all__ = ["LocalStore", "ObjectStore", "Stamp"]

Stamp = tuple[int, int, int]
"""What tells that an object is still the one that was looked at: size, mtime in ns, inode."""

_MAP_FROM_BYTES = 1 << 16
"""Smaller objects are read: a mapping costs a page at least, and the kernel limits their number."""
_WRITERS = 8


class ObjectStore(Protocol):
    """What the ledger asks of a place for bytes."""

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """Make every (path, buffer) durable, each wholly or not at all, and never overwrite.

        On return all of them survive a power cut. An object that is there already with the same
        bytes is success. After an error or a crash some may be there: callers name objects by their
        content, so that this does no harm.

        Raises:
            StorageFailed: the store did not take them.
            Corrupt: a path is there already with other bytes.
        """

    def stamp(self, path: str) -> Stamp:
        """Raises: NotFound."""

    def read(self, path: str) -> pa.Buffer:
        """The whole object, without a copy where the store can. Raises: NotFound, StorageFailed."""

    def list(self, prefix: str) -> Iterator[str]:
        """Paths of all objects below the folder `prefix`."""


class LocalStore:
    """A directory. Durable means: file synced, then named, then its directory synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pool: ThreadPoolExecutor | None = None

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore. Files are written by several threads; each directory is synced once."""
        with _translated("an object was not stored", self.root):
            targets = [self._at(path) for path, _ in objects]
            parents = list(dict.fromkeys(target.parent for target in targets))
            grown = set(parents)
            for parent in parents:
                grown |= _make_directories(parent)
            work = list(zip(targets, (data for _, data in objects), strict=True))
            self._each(_write_exclusive, work)
            self._each(_sync_directory, [(directory,) for directory in sorted(grown)])

    def stamp(self, path: str) -> Stamp:
        """See ObjectStore."""
        with _translated("an object was not found", path):
            found = os.stat(self._at(path))
            return found.st_size, found.st_mtime_ns, found.st_ino

    def read(self, path: str) -> pa.Buffer:
        """See ObjectStore. Large files are mapped; the map lives as long as the buffer."""
        with _translated("an object was not read", path):
            size, _, _ = self.stamp(path)
            if size < _MAP_FROM_BYTES:
                return pa.py_buffer(self._at(path).read_bytes())
            with pa.memory_map(str(self._at(path))) as mapped:
                return mapped.read_buffer(size)

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. Files that a crash left half-written are not listed."""
        for folder, _, files in os.walk(self._at(prefix)):
            for name in sorted(files):
                if not name.startswith(".tmp-"):
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def close(self) -> None:
        """Stop the threads. The store can be used again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _at(self, path: str) -> Path:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or "\\" in path:
            raise Corrupt(
                explain("a path leaves the store", on=path, expected="a path below its root")
            )
        return self.root.joinpath(*parts)

    def _each(self, function: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Call `function` on each; the first error is raised after all have ended."""
        if len(arguments) == 1:
            function(*arguments[0])
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="ledger-store")
        futures = [self._pool.submit(function, *args) for args in arguments]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]


def _write_exclusive(target: Path, data: Any) -> None:
    temporary = target.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            view = memoryview(data).cast("B")
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # link, unlike rename, fails where the name is taken.
        os.link(temporary, target)
    except FileExistsError:
        _require_same(target, data)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _require_same(target: Path, data: Any) -> None:
    wanted, found = file_hash(data), file_hash(target.read_bytes())
    if wanted != found:
        raise Corrupt(
            explain(
                "an object was not stored, because its name is taken by other bytes",
                on=str(target),
                expected=f"blake3 {wanted.hex()}",
                found=f"blake3 {found.hex()}",
                do="move that file away, then look at it; `ledger verify` checks the rest",
            )
        )


def _make_directories(directory: Path) -> set[Path]:
    """Make what is missing; the directories that got a new entry by it."""
    grown: set[Path] = set()
    missing = directory
    while not missing.exists():
        grown.add(missing.parent)
        missing = missing.parent
    directory.mkdir(parents=True, exist_ok=True)
    return grown


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(tried: str, on: Path | str) -> Iterator[None]:
    try:
        yield
    except (Corrupt, NotFound, StorageFailed):
        raise
    except FileNotFoundError as error:
        raise NotFound(explain(tried, on=str(on), found=str(error))) from error
    except OSError as error:
        raise StorageFailed(
            explain(
                tried,
                on=str(on),
                found=f"{type(error).__name__}: {error}",
                do="free space or make the place writable, then repeat: nothing was acknowledged",
            )
        ) from error
