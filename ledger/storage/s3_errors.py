"""What S3 and the way to it can say, in our errors: five parts, and no secret in any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ledger.errors import LedgerError, NotFound, StorageFailed, explain
from ledger.redact import redact_text

__all__ = ["answer_of", "translated"]

_CREDENTIALS = (
    "give credentials as AWS knows them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "or a role; or storage_options"
)
_RIGHTS = (
    "look at the rights of these credentials: GetObject, PutObject, DeleteObject, "
    "AbortMultipartUpload, ListBucket (without it a missing object, too, is 'denied')"
)
_WAY = "look at the network and at the endpoint (AWS_ENDPOINT_URL), then repeat"
_LATER = "repeat later: nothing was acknowledged"

_DO = {
    "NoSuchBucket": "make the bucket, or name another place",
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "403": _RIGHTS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": "set the bucket's region: AWS_DEFAULT_REGION",
    "AuthorizationHeaderMalformed": "set the bucket's region: AWS_DEFAULT_REGION",
    "301": "set the bucket's region: AWS_DEFAULT_REGION",
    "400": "renew the credentials, if their token may have expired; else look at the region",
    "EntityTooLarge": "write less at once",
    "KeyTooLongError": "give the ledger a shorter folder",
}
_DO_BY_CLASS = {
    "NoCredentialsError": _CREDENTIALS,
    "PartialCredentialsError": _CREDENTIALS,
    "CredentialRetrievalError": _CREDENTIALS,
    "TokenRetrievalError": _CREDENTIALS,
    "SSOTokenLoadError": _CREDENTIALS,
    "UnauthorizedSSOTokenError": _CREDENTIALS,
    "ProfileNotFound": "name a profile that ~/.aws/config has: AWS_PROFILE",
    "InvalidRegionError": "set the bucket's region: AWS_DEFAULT_REGION",
    "ParamValidationError": "give the ledger a bucket and a folder whose names S3 takes",
    "ValueError": _WAY,
}


def answer_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code of what S3 answered; (0, '') where it did not answer."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
        cause = cause.__cause__
    return 0, ""


@contextlib.contextmanager
def translated(tried: str, on: str) -> Iterator[None]:
    """Raise as ours what comes from s3fs, botocore, aiohttp or the network.

    Raises:
        NotFound: there is no such object.
        StorageFailed: everything else.
    """
    try:
        yield
    except LedgerError:
        raise
    except Exception as error:
        if not _is_foreign(error):
            raise
        status, code = answer_of(error)
        found = redact_text(f"{type(error).__name__}: {error}")
        if code and code not in found:
            found += f" ({code})"
        if status == 404 and code != "NoSuchBucket":
            raise NotFound(explain(tried, on=on, found=found)) from error
        do = _DO.get(code) or _DO_BY_CLASS.get(type(error).__name__)
        if do is None:
            do = _RIGHTS if status == 403 else _LATER if status else _WAY
        raise StorageFailed(explain(tried, on=on, found=found, do=do)) from error


def _is_foreign(error: Exception) -> bool:
    """Errors of the world below. Ours, and mistakes in this program, go on as they are."""
    if isinstance(error, OSError):
        return True
    return type(error).__module__.partition(".")[0] in (
        "aiobotocore",
        "aiohttp",
        "asyncio",
        "botocore",
        "fsspec",
        "s3fs",
    ) or (isinstance(error, ValueError) and "endpoint" in str(error))
