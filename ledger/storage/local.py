"""A local directory as a store."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from ledger.errors import Corrupt, NotFound, StorageFailed, explain
from ledger.hashing import file_hash
from ledger.storage.protocol import Staged, Stamp

__all__ = ["LocalStore"]

_MAP_FROM_BYTES = 1 << 16
"""Smaller objects are read: a mapping costs a page at least, and the kernel limits their number."""
_WRITERS = 8


class LocalStore:
    """A directory. Durable means: file synced, then named, then its directory synced."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root
        self._pool: ThreadPoolExecutor | None = None
        self._reached: set[Path] = set()
        """Folders whose way from the root this store has synced."""

    @property
    def uri(self) -> str:
        """See ObjectStore."""
        return self.root.absolute().as_uri()

    def stage(self, objects: Sequence[tuple[str, Sequence[Any]]]) -> list[Staged]:
        """See ObjectStore. Each file is written by a thread of its own."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="ledger-store")
        staged: list[Staged] = []
        for folder, pieces in objects:
            name = f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
            temporary = self._at(folder) / name
            written = self._pool.submit(_write_synced, temporary, pieces)
            staged.append(Staged(folder, pieces, written))
        return staged

    def publish(self, objects: Sequence[tuple[str, Staged]]) -> None:
        """See ObjectStore. Each directory is synced once."""
        with _translated("an object was not stored", self.root):
            folders: dict[Path, None] = {}
            for path, staged in objects:
                target = self._at(path)
                folders[target.parent] = None
                _name_exclusively(target, staged.written.result(), staged.pieces)
            # Another process may have made a folder and not have synced the way to it yet.
            new = [folder for folder in folders if folder not in self._reached]
            way = {up for folder in new for up in folder.parents if up.is_relative_to(self.root)}
            self._each(_sync_directory, [(folder,) for folder in sorted({*folders, *way})])
            self._reached.update(new)

    def discard(self, staged: Sequence[Staged]) -> None:
        """See ObjectStore."""
        for one in staged:
            if one.written.exception() is None:
                with contextlib.suppress(OSError):
                    os.unlink(one.written.result())

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """Stage and publish every (path, buffer). Raises what `publish` raises."""
        staged = self.stage([(path.rpartition("/")[0], [data]) for path, data in objects])
        try:
            self.publish(list(zip((path for path, _ in objects), staged, strict=True)))
        except BaseException:
            self.discard(staged)
            raise

    def stamp(self, path: str) -> Stamp:
        """See ObjectStore."""
        with _translated("an object was not found", path):
            found = os.stat(self._at(path))
            return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)

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

    def delete(self, path: str) -> None:
        """See ObjectStore."""
        target = self._at(path)
        with _translated("an object was not removed", path):
            try:
                os.unlink(target)
            except FileNotFoundError:
                return
            _sync_directory(target.parent)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """See ObjectStore: temporary files of processes that were killed."""
        before = time.time() - older_than_s
        swept = []
        with _translated("what was left behind was not removed", self.root):
            for folder, _, files in os.walk(self.root):
                for name in files:
                    path = Path(folder) / name
                    if name.startswith(".tmp-") and path.stat().st_mtime < before:
                        if not dry_run:
                            path.unlink(missing_ok=True)
                        swept.append(path.relative_to(self.root).as_posix())
        return swept

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


def _write_synced(temporary: Path, pieces: Sequence[Any]) -> Path:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary


def _name_exclusively(target: Path, temporary: Path, pieces: Sequence[Any]) -> None:
    try:
        # link, unlike rename, fails where the name is taken.
        os.link(temporary, target)
    except FileExistsError:
        _require_same(target, pieces)
    os.unlink(temporary)


def _require_same(target: Path, pieces: Sequence[Any]) -> None:
    wanted, found = file_hash(*pieces), file_hash(target.read_bytes())
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
