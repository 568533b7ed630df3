"""A local directory as a store."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from ledger.errors import Corrupt, LedgerError, NotFound, StorageFailed, explain
from ledger.hashing import file_hash
from ledger.storage.paths import TEMPORARY, require_folder, require_path
from ledger.storage.protocol import Staged, Stamp

__all__ = ["LocalStore"]

_MAKE_ROOM = "free space or make the place writable, then repeat: nothing was acknowledged"
_MAY_READ = "see that it is a folder that this user may read, with all in it, and has no faults"

_MAP_FROM_BYTES = 1 << 16
"""Smaller objects are read: a mapping costs a page at least, and the kernel limits their number."""
_WRITERS = 8
_ATTEMPTS = 100


class LocalStore:
    """A directory. Durable means: file synced, then named, then its directory synced."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root
        self._pool: ThreadPoolExecutor | None = None
        self._reached: set[Path] = set()
        """Folders whose way from the root this store has synced."""
        self._was_there = os.path.isdir(root)

    @property
    def uri(self) -> str:
        """See ObjectStore."""
        return self.root.absolute().as_uri()

    def stage(self, objects: Sequence[tuple[str, Sequence[Any]]]) -> list[Staged]:
        """See ObjectStore. Each file is written by a thread of its own."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="ledger-store")
        for folder, _ in objects:
            require_folder(folder)
        staged: list[Staged] = []
        for folder, pieces in objects:
            name = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
            temporary = self.root / folder / name
            written = self._pool.submit(self._write_aside, temporary, pieces)
            staged.append(Staged(folder, pieces, written))
        return staged

    def publish(self, objects: Sequence[tuple[str, Staged]]) -> None:
        """See ObjectStore. Each directory is synced once."""
        with _translated("an object was not stored", self.root, missing=StorageFailed):
            folders: dict[Path, None] = {}
            for path, staged in objects:
                target = self._at(path)
                folders[target.parent] = None
                _name_exclusively(target, staged.written.result(), staged.pieces)
            self._sync_folders(folders)

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

    def put_hashed(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore. A file gets its name before its bytes, and both are synced at once.

        On a journaling file system that is one commit of the journal instead of two.
        """
        with _translated("an object was not stored", self.root, missing=StorageFailed):
            folders: dict[Path, None] = {}
            for path, data in objects:
                target = self._at(path)
                folders[target.parent] = None
                self._write_named(target, data)
            self._sync_folders(folders)

    def stamp(self, path: str) -> Stamp:
        """See ObjectStore."""
        with _translated("an object was not found", path, do=_MAY_READ):
            found = os.stat(self._name(path))
            return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)

    def read(self, path: str) -> pa.Buffer:
        """See ObjectStore. Large files are mapped; the map lives as long as the buffer."""
        with _translated("an object was not read", path, do=_MAY_READ):
            name = self._name(path)
            with open(name, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < _MAP_FROM_BYTES:
                    return pa.py_buffer(file.readall())
            with pa.memory_map(name) as mapped:
                return mapped.read_buffer(size)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See ObjectStore. Files that a crash left half-written are not listed."""
        require_folder(prefix)
        with _translated("objects were not listed", prefix or self.root, do=_MAY_READ):
            for folder, name in _walk(self.root / prefix):
                if not name.startswith(TEMPORARY):
                    path = (Path(folder) / name).relative_to(self.root).as_posix()
                    if path > after:
                        yield path

    def delete(self, path: str) -> None:
        """See ObjectStore."""
        target = self._at(path)
        with _translated("an object was not removed", path):
            target.unlink(missing_ok=True)
            # Also where it was gone already: whoever removed it may have been killed before this.
            with contextlib.suppress(FileNotFoundError):
                _sync_directory(target.parent)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """See ObjectStore: temporary files of processes that were killed."""
        before = time.time() - older_than_s
        swept = []
        with _translated("what was left behind was not removed", self.root):
            for folder, name in _walk(self.root):
                path = Path(folder) / name
                # Its writer may finish it, or another sweep remove it, at any moment.
                with contextlib.suppress(FileNotFoundError):
                    if name.startswith(TEMPORARY) and path.stat().st_mtime <= before:
                        if not dry_run:
                            path.unlink()
                        swept.append(path.relative_to(self.root).as_posix())
        return swept

    def close(self) -> None:
        """Stop the threads. The store can be used again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _name(self, path: str) -> str:
        """As `_at`, as text: where thousands are opened, a Path costs more than the stat."""
        require_path(path)
        return f"{self.root}/{path}"

    def _sync_folders(self, folders: Iterable[Path]) -> None:
        # Another process may have made a folder and not have synced the way to it yet.
        new = [folder for folder in folders if folder not in self._reached]
        way = {up for folder in new for up in folder.parents if up.is_relative_to(self.root)}
        self._each(_sync_directory, [(folder,) for folder in sorted({*folders, *way})])
        self._reached.update(new)

    def _at(self, path: str) -> Path:
        require_path(path)
        return self.root / path

    def _write_aside(self, temporary: Path, pieces: Sequence[Any]) -> Path:
        self._make_folder(temporary.parent)
        return _write_synced(temporary, pieces)

    def _write_named(self, target: Path, data: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            try:
                descriptor = os.open(target, flags, 0o644)
            except FileNotFoundError:
                self._make_folder(target.parent)
                descriptor = os.open(target, flags, 0o644)
        except FileExistsError:
            # What a crash left, or what another process writes at this moment: nothing is known of
            # its bytes, but those that belong here are at hand.
            name = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
            os.replace(_write_synced(target.parent / name, [data]), target)
            return
        _write_and_sync(descriptor, target, data)

    def _make_folder(self, folder: Path) -> None:
        """With all above it; but a root that was moved away must not come into being again."""
        if self._was_there:
            os.stat(self.root)
        folder.mkdir(parents=True, exist_ok=True)
        self._was_there = True

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
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            _write_all(descriptor, piece)
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary


def _write_and_sync(descriptor: int, target: Path, data: Any) -> None:
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        except BaseException:
            # Another process may have put its own file here: only the one that is open is undone.
            own = os.fstat(descriptor).st_ino
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(target).st_ino == own:
                    os.unlink(target)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, piece: Any) -> None:
    view = memoryview(piece).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _name_exclusively(target: Path, temporary: Path, pieces: Sequence[Any]) -> None:
    for _ in range(_ATTEMPTS):
        try:
            # link, unlike rename, fails where the name is taken.
            os.link(temporary, target)
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                _require_same(target, pieces)
                _renew(target)
                break
    else:
        raise StorageFailed(
            explain(
                "an object was not stored: others make and remove it all the time",
                on=str(target),
                found=f"{_ATTEMPTS} attempts were overtaken",
                do="repeat: nothing was acknowledged",
            )
        )
    os.unlink(temporary)


def _renew(target: Path) -> None:
    """Make a file as young and as durable as if it were new.

    Whoever removes old files that nobody refers to must not take it, and whoever copied it here
    may not have synced it. Raises FileNotFoundError where it was removed in this moment.
    """
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.utime(descriptor)
        os.fsync(descriptor)
        # It may have been removed between opening and renewing it.
        os.stat(target)
    finally:
        os.close(descriptor)


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


def _walk(top: Path) -> Iterator[tuple[str, str]]:
    """(folder, name) of every file below `top`. Raises OSError, but not for what has just gone."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for folder, _, files in os.walk(top, onerror=failed):
        for name in sorted(files):
            yield folder, name


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(
    tried: str, on: Path | str, *, missing: type[LedgerError] = NotFound, do: str = _MAKE_ROOM
) -> Iterator[None]:
    try:
        yield
    except (Corrupt, NotFound, StorageFailed):
        raise
    except FileNotFoundError as error:
        raise missing(explain(tried, on=str(on), found=str(error))) from error
    except OSError as error:
        raise StorageFailed(
            explain(
                tried,
                on=str(on),
                found=f"{type(error).__name__}: {error}",
                do=do,
            )
        ) from error
