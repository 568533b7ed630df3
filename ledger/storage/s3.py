"""A store on S3, or on what speaks like it, through s3fs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from ledger.storage import s3_objects as objects_of
from ledger.storage.cache import BufferCache, cache_bytes
from ledger.storage.paths import require_folder
from ledger.storage.protocol import Staged, Stamp
from ledger.storage.s3_errors import answer_of, translated
from ledger.storage.s3_place import open_filesystem, parse_s3

__all__ = ["S3Store"]

_AT_ONCE = 8
_PAGE = 1000
_NOT_STORED = "an object was not stored"


class S3Store:
    """A folder of a bucket. Durable means: S3 said that it has the object.

    An object is sent when it is published, not before: S3 wants its name first. Several of one
    publication travel at the same time, large ones in parts. Whole objects that were read are kept
    in memory up to `cache_bytes` (default: LEDGER_CACHE_BYTES, or 256 MiB): reading them again
    costs one HEAD by `stamp` and no transfer. An object that changed, as none should, is noticed by
    its ETag there.

    Threads may share a store. After a fork, the child connects anew.
    """

    root = None

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_bytes: int = objects_of.PART_BYTES,
        cache_bytes: int | None = None,
        page: int = _PAGE,
    ) -> None:
        """Connects to nothing yet but reads the settings.

        `part_bytes`: objects of more than twice this are sent in parts; S3 takes none below 5 MiB.
        `page`: how many names are asked for at a time; S3 gives no more than 1,000.

        Raises:
            InvalidArgument: no place on S3, or an option that s3fs does not know.
            MissingDependency: s3fs is not installed.
            StorageFailed: a profile or an endpoint that cannot be.
        """
        self._place = parse_s3(uri)
        self.uri = self._place.uri
        self._options = dict(storage_options or {})
        self._part_bytes = part_bytes
        self._page = page
        self._cache = BufferCache(_limit(cache_bytes))
        self._process = 0
        self._connect()

    @property
    def cached_bytes(self) -> int:
        """How much it keeps in memory now."""
        return self._cache.size_bytes

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
        named = [(self._place.key(path), staged.pieces) for path, staged in objects]

        async def publish(bucket: objects_of.Bucket) -> None:
            await objects_of.together(objects_of.create(bucket, *one) for one in named)

        with translated(_NOT_STORED, self.uri):
            self._run(publish)

    def discard(self, staged: Sequence[Staged]) -> None:
        """See ObjectStore. Nothing was sent."""

    def put(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore."""
        staged = self.stage([("", [data]) for _, data in objects])
        self.publish(list(zip((path for path, _ in objects), staged, strict=True)))

    def put_hashed(self, objects: Sequence[tuple[str, Any]]) -> None:
        """See ObjectStore."""
        self.put(objects)

    def stamp(self, path: str) -> Stamp:
        """See ObjectStore. One HEAD; the identity is the ETag."""
        key = self._place.key(path)
        try:
            with translated("an object was not found", f"{self.uri}/{path}"):
                found = self._ask("head_object", Key=key)
        except LookupError:
            self._cache.forget(path)
            raise
        self._cache.forget(path, unless=found["ETag"])
        modified_ns = int(found["LastModified"].timestamp()) * 1_000_000_000
        return Stamp(found["ContentLength"], modified_ns, found["ETag"])

    def read(self, path: str) -> pa.Buffer:
        """See ObjectStore. One GET up to a part, more at a time for larger objects."""
        kept = self._cache.get(path)
        if kept is not None:
            return kept
        key = self._place.key(path)
        with translated("an object was not read", f"{self.uri}/{path}"):
            data, etag = self._run(lambda bucket: objects_of.read(bucket, key))
        self._cache.keep(path, etag, data)
        return data

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See ObjectStore. A page at a time, asked for when it is needed."""
        require_folder(prefix)
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        below = f"{root}{prefix}/" if prefix else root
        more = {"StartAfter": root + after} if after else {}
        while True:
            with translated("objects were not listed", f"{self.uri}/{prefix}"):
                page = self._ask("list_objects_v2", Prefix=below, MaxKeys=self._page, **more)
            for found in page.get("Contents", ()):
                yield found["Key"].removeprefix(root)
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, path: str) -> None:
        """See ObjectStore."""
        key = self._place.key(path)
        self._cache.forget(path)
        with translated("an object was not removed", f"{self.uri}/{path}"):
            self._ask("delete_object", Key=key)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """See ObjectStore. What interrupted writes leave here are multipart uploads."""
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        swept: list[str] = []
        more: dict[str, str] = {}
        with translated("unfinished uploads were not removed", self.uri):
            while True:
                page = self._ask(
                    "list_multipart_uploads", Prefix=root, MaxUploads=self._page, **more
                )
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"].timestamp() > time.time() - older_than_s:
                        continue
                    swept.append(f"{upload['Key'].removeprefix(root)} ({upload['UploadId']})")
                    if not dry_run:
                        self._abort(upload["Key"], upload["UploadId"])
                if not page.get("IsTruncated"):
                    return swept
                more = {
                    "KeyMarker": page["NextKeyMarker"],
                    "UploadIdMarker": page["NextUploadIdMarker"],
                }

    def close(self) -> None:
        """Let go of the connections and of what is kept. The store can be used again."""
        self._cache.clear()
        self._process = 0
        self._filesystem = None

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._ask("abort_multipart_upload", Key=key, UploadId=upload)
        except FileNotFoundError as error:
            # It was finished, or removed by another, since it was listed.
            if answer_of(error)[1] != "NoSuchUpload":
                raise

    def _connect(self) -> Any:
        """The filesystem of this process: its connections and its thread do not survive a fork."""
        if self._process != os.getpid():
            with translated("a ledger on S3 cannot be opened", self.uri):
                self._filesystem = open_filesystem(self._options)
            self._bucket = self._filesystem_bucket()
            self._process = os.getpid()
        return self._filesystem

    def _filesystem_bucket(self) -> objects_of.Bucket:
        return objects_of.Bucket(self._filesystem, self._place.bucket, self._part_bytes, _AT_ONCE)

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._connect().call_s3(method, Bucket=self._place.bucket, **arguments)

    def _run(self, work: Callable[[objects_of.Bucket], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on s3fs's loop, which has a thread of its own, and wait for it."""
        loop = self._connect().loop
        return asyncio.run_coroutine_threadsafe(work(self._bucket), loop).result()


def _limit(given: int | None) -> int:
    return cache_bytes() if given is None else given
