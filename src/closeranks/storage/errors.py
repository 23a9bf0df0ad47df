"""Classifies errors of disks and object stores: whether to retry, and what to tell the user.

Pure: from the exception to a verdict. Errors of object stores are classified by the response (HTTP status, error code)
and by the names of exception classes, so that no client library is imported here. Invariants: an error that may be gone
a moment later is retried, a refusal never is; every message names the place where it happened.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from closeranks.storage.protocol import (
    ChangedError,
    DeniedError,
    ExistsError,
    FullError,
    MissingError,
    StorageError,
)


class UnknownUploadError(StorageError):
    """The store knows no such upload: it was already completed or aborted, or the store lost it in a restart."""


_KIND_OF_ERRNO: dict[int, type[StorageError]] = {
    errno.ENOSPC: FullError,
    errno.EDQUOT: FullError,
    errno.EFBIG: FullError,
    errno.EROFS: DeniedError,
    errno.EACCES: DeniedError,
    errno.EPERM: DeniedError,
    errno.ENOENT: MissingError,
    errno.ENOTDIR: MissingError,
    errno.EEXIST: ExistsError,
}
_WORDS_OF_ERRNO = {
    errno.ENOSPC: "no space is left on the device; free some, or save elsewhere (checkpoint.folder)",
    errno.EDQUOT: "the disk quota is used up; free some space, or save elsewhere (checkpoint.folder)",
    errno.EFBIG: "the file is larger than the file system or the limit of this process (ulimit -f) allows",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "permission denied; check the owner and the mode of the folder",
    errno.EPERM: "operation not permitted",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "it already exists",
    errno.EIO: "the device reported an input/output error; check the kernel log (dmesg)",
    errno.ESTALE: "stale file handle on the network file system",
}
_PASSING_ERRNO = frozenset(
    (
        errno.EBUSY,
        errno.EAGAIN,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
    )
)
_PASSING_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_PASSING_CODES = frozenset(
    (
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "TooManyRequests",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "OperationAborted",
        "ConditionalRequestConflict",
        # The bytes were damaged or truncated in transit: sending the same part again is the remedy.
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
    )
)
# Class names of botocore, aiohttp, urllib3 and similar libraries.
_PASSING_CLASSES = frozenset(
    (
        "HTTPClientError",
        "ClientPayloadError",
        "ClientConnectionError",
        "IncompleteRead",
        "IncompleteReadError",
        "ResponseStreamingError",
        "ResponseParserError",
        "ConnectionError",
        "TimeoutError",
    )
)
_CREDENTIAL_CLASSES = frozenset(
    (
        "PermissionError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "ClientAuthenticationError",
    )
)
_KIND_OF_STATUS: dict[int, type[StorageError]] = {
    401: DeniedError,
    403: DeniedError,
    404: MissingError,
    412: ExistsError,
    413: FullError,
    416: ChangedError,
    507: FullError,
}
_KIND_OF_CODE: dict[str, type[StorageError]] = {
    "PreconditionFailed": ExistsError,
    "NoSuchUpload": UnknownUploadError,
    "QuotaExceeded": FullError,
    "InsufficientStorage": FullError,
    "XMinioStorageFull": FullError,
}
_WORDS_OF_KIND: dict[type[StorageError], str] = {
    DeniedError: "access denied; check the credentials and their permissions",
    MissingError: "there is no such file, object or bucket",
    ExistsError: "it already exists",
    ChangedError: "it is shorter than it should be",
    FullError: "the store is out of space",
    UnknownUploadError: "the store no longer has this upload; the file must be uploaded again",
}


def disk_error(error: OSError, doing: str, path: object) -> StorageError:
    """``doing`` is a gerund for the message: ``writing``, ``reading``."""
    code = error.errno or 0
    kind = _KIND_OF_ERRNO.get(code, StorageError)
    return kind(f"{doing} {path} failed: {_WORDS_OF_ERRNO.get(code, error.strerror or str(error))}")


def store_error(error: Exception, doing: str, url: str) -> StorageError:
    """The same for any exception that a remote file system raised."""
    error = _meant(error)
    kind = _store_kind(error)
    words = _WORDS_OF_KIND.get(kind, "")
    message = " ".join(str(error).split()) or type(error).__name__
    code = _code(error)
    detail = message if not code or code in message else f"{code}: {message}"
    return kind(f"{doing} {url} failed: {words} ({detail})" if words else f"{doing} {url} failed: {detail}")


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed if it is repeated in a moment."""
    error = _meant(error)
    if _code(error) in _PASSING_CODES or _status(error) in _PASSING_STATUS:
        return True
    if _status(error) or _kind_of_class(error):
        return False
    if _class_names(error) & _PASSING_CLASSES:
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNO


def _store_kind(error: Exception) -> type[StorageError]:
    found = _KIND_OF_CODE.get(_code(error)) or _KIND_OF_STATUS.get(_status(error)) or _kind_of_class(error)
    if found:
        return found
    return _KIND_OF_ERRNO.get(error.errno or 0, StorageError) if isinstance(error, OSError) else StorageError


def _meant(error: Exception) -> Exception:
    """fsspec reports any failure to open a file of a web server as a missing file; the cause has the real error."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    return cause if _status(cause) or _class_names(cause) & _PASSING_CLASSES else error


def _kind_of_class(error: Exception) -> type[StorageError] | None:
    names = _class_names(error)
    if names & _CREDENTIAL_CLASSES:
        return DeniedError
    if "FileNotFoundError" in names:
        return MissingError
    return ExistsError if "FileExistsError" in names else None


def _class_names(error: Exception) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Client libraries wrap exceptions: the store's response is attached to one of the causes."""
    here: BaseException | None = error
    while here is not None:
        yield here
        here = here.__cause__


def _code(error: Exception) -> str:
    """The store's own error code: ``SlowDown``, ``NoSuchKey``."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _status(error: Exception) -> int:
    """The HTTP status, wherever the client library keeps it; 0 if there was no response.

    Only attributes of the error itself are used: aiohttp attaches a 400 of its own to a truncated body.
    """
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # One at a time: aiohttp warns on access to `code`.
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((value for value in values if isinstance(value, int) and 400 <= value < 600), 0)
