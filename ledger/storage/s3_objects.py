"""Single objects on S3: created whole and exclusively, read in ranges. Coroutines, on s3fs's loop.

An object that S3 shows is whole, by S3's own promise for PutObject and CompleteMultipartUpload.
Both are made conditional (`If-None-Match: *`): of several creators one wins and the others get 412
(it is there) or 409 (try again).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from ledger.errors import Corrupt, StorageFailed, explain
from ledger.hashing import file_hash
from ledger.storage.s3_errors import answer_of

__all__ = ["PART_BYTES", "create", "read"]

PART_BYTES = 16 << 20
"""Larger objects are sent and read in parts of this size, several at a time."""
MOST_PARTS = 10_000
"""S3 takes no more in one object: the parts of a very large one are larger."""
_ATTEMPTS = 8
_FIRST_WAIT_S = 0.05


class Bucket:
    """Requests about one bucket, of which only so many are on their way at a time."""

    def __init__(self, filesystem: Any, name: str, part_bytes: int, at_once: int) -> None:
        self._filesystem = filesystem
        self._turns = asyncio.Semaphore(at_once)
        self.name = name
        self.part_bytes = part_bytes

    async def ask(self, method: str, **arguments: Any) -> Any:
        """One request by the name that boto3 gives it. Raises what s3fs raises."""
        async with self._turns:
            return await self._filesystem._call_s3(method, Bucket=self.name, **arguments)

    async def send(self, method: str, pieces: Sequence[memoryview], **arguments: Any) -> Any:
        """A request with a body. The body is put together when its turn has come."""
        async with self._turns:
            body = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
            return await self._filesystem._call_s3(method, Bucket=self.name, Body=body, **arguments)

    async def get(self, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """The answer to GetObject, and its body; begun again where the body breaks off."""
        from s3fs.core import S3_RETRYABLE_ERRORS

        attempt = 0
        while True:
            async with self._turns:
                answer = await self._filesystem._call_s3(
                    "get_object", Bucket=self.name, **arguments
                )
                try:
                    return answer, await answer["Body"].read()
                except S3_RETRYABLE_ERRORS:
                    if attempt == _ATTEMPTS - 1:
                        raise
                finally:
                    answer["Body"].close()
            await _wait(attempt)
            attempt += 1


async def create(bucket: Bucket, key: str, pieces: Sequence[Any]) -> None:
    """Make an object that is not there, or see that it is there with these very bytes.

    One that is there is written again with the same bytes, so that it is as young as if it were
    new: whoever removes old objects that nobody refers to must not take it.

    Raises:
        Corrupt: it is there with other bytes.
        StorageFailed: others kept making and removing it.
    """
    views = [memoryview(piece).cast("B") for piece in pieces]
    for attempt in range(_ATTEMPTS):
        try:
            await _write(bucket, key, views, {"IfNoneMatch": "*"})
            return
        except OSError as error:
            if not _lost(error):
                raise
        # Somebody else's, or our own of which the acknowledgement was lost.
        try:
            found, etag = await read(bucket, key)
            _require_same(f"s3://{bucket.name}/{key}", views, found)
            await _write(bucket, key, views, {"IfMatch": etag})
            return
        except OSError as error:
            if isinstance(error, Corrupt) or not (_lost(error) or _gone(error)):
                raise
        await _wait(attempt)
    raise StorageFailed(
        explain(
            "an object was not stored: others make and remove it all the time",
            on=f"s3://{bucket.name}/{key}",
            found=f"{_ATTEMPTS} attempts were overtaken",
            do="repeat: nothing was acknowledged",
        )
    )


async def read(bucket: Bucket, key: str) -> tuple[pa.Buffer, str]:
    """A whole object, and its ETag."""
    last = bucket.part_bytes - 1
    try:
        answer, first = await bucket.get(Key=key, Range=f"bytes=0-{last}")
    except OSError as error:
        if answer_of(error)[0] != 416:
            raise
        # No range lies within an empty object.
        answer, first = await bucket.get(Key=key)
    etag, total = str(answer["ETag"]), len(first)
    if "ContentRange" in answer:
        total = int(answer["ContentRange"].rpartition("/")[2])
    if total == len(first):
        return pa.py_buffer(first), etag
    whole = pa.allocate_buffer(total)
    view = memoryview(whole).cast("B")
    view[: len(first)] = first

    async def part(start: int) -> None:
        stop = min(start + bucket.part_bytes, total)
        _, data = await bucket.get(Key=key, Range=f"bytes={start}-{stop - 1}", IfMatch=etag)
        view[start:stop] = data

    await together(part(start) for start in range(len(first), total, bucket.part_bytes))
    return whole, etag


async def together(work: Iterator[Awaitable[None]]) -> None:
    """Do all at once; when all have ended, the first error is raised."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _write(
    bucket: Bucket, key: str, views: Sequence[memoryview], condition: dict[str, str]
) -> None:
    size = sum(view.nbytes for view in views)
    if size <= 2 * bucket.part_bytes:
        await bucket.send("put_object", views, Key=key, **condition)
        return
    upload = (await bucket.ask("create_multipart_upload", Key=key))["UploadId"]
    try:
        parts = list(_parts(views, max(bucket.part_bytes, -(-size // MOST_PARTS))))
        tags = [""] * len(parts)

        async def part(index: int) -> None:
            answer = await bucket.send(
                "upload_part", parts[index], Key=key, UploadId=upload, PartNumber=index + 1
            )
            tags[index] = answer["ETag"]

        await together(part(index) for index in range(len(parts)))
        made = [{"PartNumber": i + 1, "ETag": tag} for i, tag in enumerate(tags)]
        await bucket.ask(
            "complete_multipart_upload",
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": made},
            **condition,
        )
    except BaseException:
        # What this does not reach is paid for until a sweep or a lifecycle rule removes it; the
        # error that counts is the first one.
        with contextlib.suppress(Exception):
            await bucket.ask("abort_multipart_upload", Key=key, UploadId=upload)
        raise


def _parts(views: Sequence[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in parts of one size; the last is shorter."""
    part: list[memoryview] = []
    free = part_bytes
    for view in views:
        rest = view
        while rest.nbytes:
            part.append(rest[:free])
            rest = rest[free:]
            free -= part[-1].nbytes
            if not free:
                yield part
                part, free = [], part_bytes
    if part:
        yield part


def _lost(error: OSError) -> bool:
    """Whether a conditional write was refused because of somebody else's."""
    status, code = answer_of(error)
    # NoSuchUpload: the upload was completed by a request whose answer got lost, or was swept.
    return status in (409, 412) or code == "NoSuchUpload"


def _gone(error: OSError) -> bool:
    """Whether the object that was in the way is there no longer."""
    status, code = answer_of(error)
    return status == 404 and code != "NoSuchBucket"


def _require_same(uri: str, views: Sequence[memoryview], found: pa.Buffer) -> None:
    wanted, got = file_hash(*views), file_hash(found)
    if wanted != got:
        raise Corrupt(
            explain(
                "an object was not stored, because its name is taken by other bytes",
                on=uri,
                expected=f"{sum(v.nbytes for v in views)} bytes, blake3 {wanted.hex()}",
                found=f"{found.size} bytes, blake3 {got.hex()}",
                do="move that object away, then look at it; `ledger verify` checks the rest",
            )
        )


async def _wait(attempt: int) -> None:
    # At random, so that writers that got in each other's way do not meet again.
    await asyncio.sleep(_FIRST_WAIT_S * 2**attempt * random.random())
