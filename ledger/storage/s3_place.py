"""Where a ledger lies on S3, and the filesystem that reaches it.

Credentials, endpoint, region and profile are found as fsspec and AWS find them: `storage_options`,
`FSSPEC_S3_*`, `AWS_*`, the files in ~/.aws, and the role of the machine. None is stored or printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, MissingDependency, explain
from ledger.redact import redact_text
from ledger.storage.paths import require_path

__all__ = ["S3Place", "open_filesystem", "parse_s3"]

_SCHEME = "s3://"


@dataclasses.dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket, and the folder in it that is the store's root."""

    bucket: str
    """A name, or the ARN of an access point."""
    prefix: str
    """Without '/' at either end; '' is the whole bucket."""

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, path: str) -> str:
        """The key of an object. Raises: Corrupt, for a path that leaves the store."""
        require_path(path)
        return f"{self.prefix}/{path}" if self.prefix else path


def parse_s3(uri: str) -> S3Place:
    """Take s3://bucket/folder apart.

    Raises:
        InvalidArgument: it has no bucket, has credentials or parameters in it, or a strange path.
    """
    rest = uri.removeprefix(_SCHEME)
    if rest == uri or any(c in rest for c in "@?#"):
        raise InvalidArgument(
            explain(
                "a place on S3 cannot be read",
                # A secret may have a '/' in it, so that no rule for addresses finds it.
                on=_SCHEME + "…" + rest.rpartition("@")[2].partition("?")[0].partition("#")[0],
                expected="s3://bucket/folder, without credentials or parameters",
                do="give credentials as AWS knows them (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role), or in storage_options",
            )
        )
    parts = rest.rstrip("/").split("/")
    # An access point: arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME
    count = 2 if parts[0].startswith("arn:") and parts[0].endswith(":accesspoint") else 1
    bucket, prefix = "/".join(parts[:count]), "/".join(parts[count:])
    try:
        require_path(bucket)
        if prefix:
            require_path(prefix)
    except OSError as error:
        raise InvalidArgument(
            explain("a place on S3 cannot be read", on=repr(uri), expected="s3://bucket/folder")
        ) from error
    return S3Place(bucket, prefix)


def open_filesystem(options: Mapping[str, Any]) -> Any:
    """A connected s3fs filesystem, shared (as fsspec does) by all of one process and same options.

    It keeps no listings: they would hide the objects of other writers.

    Raises:
        MissingDependency: s3fs is not installed, or its botocore knows no conditional writes.
        InvalidArgument: an option that s3fs does not know.
    """
    try:
        import s3fs
    except ImportError as error:
        raise MissingDependency(
            explain(
                "a ledger on S3 cannot be opened: a package is missing",
                on="s3fs",
                found=str(error),
                do="pip install 'trajectory-ledger[s3]'",
            )
        ) from error
    try:
        filesystem = s3fs.S3FileSystem(**{**options, "use_listings_cache": False})
        service = filesystem.s3.meta.service_model
    except (TypeError, KeyError) as error:
        raise InvalidArgument(
            explain(
                "a ledger on S3 cannot be opened: an option is not known",
                on=f"storage_options {sorted(options)}",
                expected="arguments of s3fs.S3FileSystem",
                found=redact_text(str(error)),
            )
        ) from error
    for operation in ("PutObject", "CompleteMultipartUpload"):
        # s3fs drops an argument that botocore does not know: an exclusive create would overwrite.
        if "IfNoneMatch" not in service.operation_model(operation).input_shape.members:
            raise MissingDependency(
                explain(
                    "a ledger on S3 cannot be opened: botocore knows no conditional writes",
                    on=operation,
                    do="pip install --upgrade 'trajectory-ledger[s3]' 'botocore>=1.36'",
                )
            )
    return filesystem
