"""Where bytes lie: what the ledger asks of any place.

A path is relative to the store's root, with '/' between its parts. An object is written once,
whole, and never changed. Errors of the world below (a full disk, a read-only mount, a network that
is gone) come out as StorageFailed, a missing object as NotFound, a path that leaves the root as
Corrupt. Threads may share a store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

__all__ = ["ObjectStore", "Staged", "Stamp"]


class Stamp(NamedTuple):
    """What tells that an object is still the one that was looked at."""

    size_bytes: int
    modified_ns: int
    """When it was written or renewed, by the store's clock: nanoseconds since 1970-01-01 UTC."""
    identity: int | str
    """The store's own: an inode, an entity tag. Other bytes under the same name have another."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Bytes on their way into a store, without a name yet."""

    folder: str
    """Where they will be named."""
    pieces: Sequence[Any]
    written: Future[Any]
    """Done when the store has them; its result is the store's own."""


class ObjectStore(Protocol):
    """What the ledger asks of a place for bytes."""

    @property
    def uri(self) -> str:
        """Where it is, without any secret."""

    @property
    def root(self) -> Path | None:
        """The folder, where it is one on this machine."""

    def stage(self, objects: Sequence[tuple[str, Sequence[Any]]]) -> list[Staged]:
        """Begin to store (folder, pieces of the bytes) in the background, without a name.

        The pieces must not change before `publish` or `discard`, one of which must follow. Errors
        of the store show in `publish`.
        """

    def publish(self, objects: Sequence[tuple[str, Staged]]) -> None:
        """Name staged bytes: each is there wholly or not at all, and nothing is overwritten.

        Each path lies in the folder its bytes were staged for. On return all of them survive a
        power cut. An object that is there already with the same bytes is success, and its stamp
        becomes as young as a new one's, so that nobody takes it for a leftover. After an error or a
        crash some may be there: callers name objects by their content, so that this does no harm.

        Raises:
            StorageFailed: the store did not take them.
            Corrupt: a path is there already with other bytes.
        """

    def discard(self, staged: Sequence[Staged]) -> None:
        """Forget staged bytes; those that were published stay. Never raises."""

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """Stage and publish every (path, buffer). Raises what `publish` raises."""

    def put_hashed(self, objects: Sequence[tuple[str, Any]]) -> None:
        """As `put`, of a few small (path, buffer) whose paths hold the hashes of their bytes.

        A crash in the middle may leave other bytes under such a name; nobody refers to them, and
        the next put replaces them.

        Raises:
            StorageFailed: the store did not take them.
        """

    def stamp(self, path: str) -> Stamp:
        """Raises: NotFound, StorageFailed."""

    def read(self, path: str) -> pa.Buffer:
        """The whole object, without a copy where the store can. Raises: NotFound, StorageFailed."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """Paths of all objects below the folder `prefix` ('': all), in no promised order.

        With `after`, only paths that sort after it: where the service can, others cost nothing.

        Raises: StorageFailed.
        """

    def delete(self, path: str) -> None:
        """Remove an object for good; one that is not there is success. Raises: StorageFailed."""

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """Remove what interrupted writes left behind, if it is older; the paths of what that is.

        With `dry_run` nothing is removed. What is published is never touched.

        Raises: StorageFailed.
        """

    def close(self) -> None:
        """Let go of threads and connections. The store can be used again."""
