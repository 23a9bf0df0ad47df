from __future__ import annotations

import errno

import botocore.exceptions as boto
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from closeranks.storage.errors import UnknownUploadError, disk_error, is_transient, store_error
from closeranks.storage.object_store.multipart import part_size
from closeranks.storage.object_store.retry import RetryPolicy, retry
from closeranks.storage.protocol import (
    DeniedError,
    ExistsError,
    FullError,
    MissingError,
    StorageError,
)


def answer(code: str, status: int) -> ClientError:
    response = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def wrapped(cause: Exception) -> FileNotFoundError:
    """As fsspec tells whatever happened on the way to a web server."""
    error = FileNotFoundError("http://x/y")
    error.__cause__ = cause
    return error


PASSING = [
    answer("SlowDown", 503),
    answer("InternalError", 500),
    answer("503", 503),
    answer("RequestTimeout", 400),
    answer("BadDigest", 400),
    answer("ConditionalRequestConflict", 409),
    answer("Weird", 429),
    boto.EndpointConnectionError(endpoint_url="http://x"),
    boto.ConnectionClosedError(endpoint_url="http://x"),
    boto.ReadTimeoutError(endpoint_url="http://x"),
    boto.ConnectTimeoutError(endpoint_url="http://x"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    OSError(errno.EBUSY, "busy"),
    wrapped(TimeoutError()),
    wrapped(answer("503", 503)),
]
REFUSED: list[tuple[Exception, type[StorageError]]] = [
    (answer("AccessDenied", 403), DeniedError),
    (answer("SignatureDoesNotMatch", 403), DeniedError),
    (answer("403", 403), DeniedError),
    (boto.NoCredentialsError(), DeniedError),
    (PermissionError(errno.EACCES, "no"), DeniedError),
    (answer("NoSuchKey", 404), MissingError),
    (answer("NoSuchBucket", 404), MissingError),
    (FileNotFoundError("x"), MissingError),
    (wrapped(KeyError("x")), MissingError),
    (wrapped(answer("404", 404)), MissingError),
    (wrapped(answer("403", 403)), DeniedError),
    (answer("NoSuchUpload", 404), UnknownUploadError),
    (answer("PreconditionFailed", 412), ExistsError),
    (FileExistsError("x"), ExistsError),
    (answer("InsufficientStorage", 507), FullError),
    (OSError(errno.ENOSPC, "full"), FullError),
    (answer("InvalidArgument", 400), StorageError),
    (RuntimeError("anything"), StorageError),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    """As botocore raises it, and as s3fs hands it on."""
    assert is_transient(error)
    assert is_transient(translate_boto_error(error))


@pytest.mark.parametrize(("error", "kind"), REFUSED, ids=repr)
def test_a_refusal_is_told_once(error: Exception, kind: type[StorageError]) -> None:
    for raised in (error, translate_boto_error(error)):
        assert not is_transient(raised)
        told = store_error(raised, "writing", "s3://bucket/latest")
        assert type(told) is kind
        assert str(told).startswith("writing s3://bucket/latest failed: ")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, FullError, "no space is left"),
        (errno.EDQUOT, FullError, "quota"),
        (errno.EROFS, DeniedError, "read-only"),
        (errno.EACCES, DeniedError, "permission denied"),
        (errno.ENOENT, MissingError, "no such file"),
        (errno.EEXIST, ExistsError, "already exists"),
        (errno.EIO, StorageError, "input/output error"),
        (errno.ENAMETOOLONG, StorageError, "too long"),
    ],
)
def test_errors_of_a_disk_are_sentences(code: int, kind: type[StorageError], words: str) -> None:
    told = disk_error(OSError(code, "File name too long"), "writing", "/a/b")
    assert type(told) is kind
    assert str(told).startswith("writing /a/b failed: ")
    assert words in str(told)


@given(st.integers(1, 20), st.floats(0.001, 5), st.floats(5, 60), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_bound(num_tries: int, first_s: float, longest_s: float, dice: float) -> None:
    pauses = list(RetryPolicy(num_tries, first_s, longest_s).delays(lambda: dice))
    assert len(pauses) == num_tries - 1
    assert pauses == sorted(pauses)
    assert all(first_s / 2 <= pause_s <= longest_s for pause_s in pauses)


def test_patience_ends_within_half_a_minute() -> None:
    assert 10 < sum(RetryPolicy().delays(lambda: 0.0)) < 30


def test_tries_are_counted_and_the_last_error_is_told() -> None:
    tried: list[int] = []

    def fail() -> None:
        tried.append(1)
        raise TimeoutError("no answer")

    with pytest.raises(StorageError, match="reading s3://x failed: no answer"):
        retry(fail, "reading", "s3://x", RetryPolicy(4, 0.0, 0.0))
    assert len(tried) == 4


@given(st.integers(0, 50 << 40), st.integers(5 << 20, 1 << 30))
def test_no_file_needs_more_parts_than_a_store_takes(num_bytes: int, wanted: int) -> None:
    size = part_size(num_bytes, wanted)
    assert size >= wanted
    assert -(-num_bytes // size) <= 10_000
