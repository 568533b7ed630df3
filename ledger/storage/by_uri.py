"""From the URI of a place to its store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ledger.errors import InvalidArgument, explain
from ledger.redact import redact_text
from ledger.storage.local import LocalStore
from ledger.storage.protocol import ObjectStore

__all__ = ["SCHEMES", "open_store"]

SCHEMES = "a path, file://, s3://bucket/folder or memory://NAME"


def open_store(uri: str | Path, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at a path or URI. Nothing is made and nothing is looked at there yet.

    `storage_options` goes to the filesystem as fsspec users know it (for S3: the arguments of
    s3fs.S3FileSystem). They are neither stored nor printed.

    Raises:
        InvalidArgument: another kind of place, credentials in the URI, or options that the place
            does not take.
        MissingDependency: the package that reaches it is not installed.
        StorageFailed: the settings for it cannot work.
    """
    text = str(uri)
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme == "s3":
        from ledger.storage.s3 import S3Store

        return S3Store(text, storage_options)
    if storage_options:
        raise InvalidArgument(
            explain(
                "a place takes no storage options",
                on=redact_text(text),
                found=f"storage_options {sorted(storage_options)}",
                do="leave them out; they are for s3://",
            )
        )
    if scheme == "memory":
        from ledger.storage.memory import MemoryStore

        return MemoryStore(text)
    if scheme == "":
        return LocalStore(Path(uri).absolute())
    parts = urlsplit(text)
    if scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parts.path)).absolute())
    raise InvalidArgument(
        explain(
            "a place of this kind is not known",
            on=redact_text(text),
            expected=SCHEMES,
        )
    )
