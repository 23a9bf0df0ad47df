"""The error messages of the cache.

Invariant: every message names the folder or file, and its fix names the setting that helps.
"""

from __future__ import annotations

import errno
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.storage.protocol import ChangedError, MissingError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_disk_full(error: OSError) -> bool:
    return error.errno in _FULL


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"


def cache_error(error: OSError, folder: Path) -> DataError:
    place = error.filename or folder
    if is_disk_full(error):
        what = f"the disk of the cache {folder} is full, and nothing more can be evicted"
        return DataError(what, "Free some space there, or set data.cache to a folder on another disk.")
    if error.errno in _DENIED:
        what = f"the cache cannot be used: {place}: {error.strerror}"
        return DataError(what, "Check the owner and the mode of the folder, or set data.cache to another.")
    what = f"the cache {folder} failed: {place}: {error.strerror or error}"
    return DataError(what, "Check the disk, or set data.cache to another folder.")


def storage_error(error: StorageError) -> DataError:
    """The storage's own message already says what to do about it, where it can."""
    if isinstance(error, ChangedError):
        return DataError(str(error), "Put the old file back, or start again with the files as they are now.")
    if isinstance(error, MissingError):
        return DataError(str(error), "Check the place, and that every file has arrived there; copy what is missing.")
    return DataError(str(error))


def not_listed_error(name: str, url: str) -> DataError:
    what = f"'{name}' is not among the files of {url}, or was not when they were listed"
    return DataError(what, "Check the name, and whether all files are there.")


def empty_error(url: str) -> DataError:
    return DataError(f"there are no files in {url}", "Check the place, and whether the data has arrived there.")


def too_large_error(url: str, num_bytes: int, max_bytes: int) -> DataError:
    what = f"{url} has {_mib(num_bytes)}, and the cache may take {_mib(max_bytes)} in all"
    return DataError(what, f"Set data.cache_bytes to several times {num_bytes}.")


def no_space_error(url: str, num_bytes: int, folder: Path, max_bytes: int, waited_s: float) -> DataError:
    where = f"there is no room for {url} ({_mib(num_bytes)}) in the cache {folder}"
    what = f"{where}: all of its {_mib(max_bytes)} are in use, and too little was released within {waited_s:.0f} s"
    return DataError(what, "Set data.cache_bytes higher, or data.workers lower.")


def lock_timeout_error(lock: Path, waited_s: float) -> DataError:
    what = f"the lock on {lock} in the cache was not released within {waited_s:.0f} s"
    return DataError(what, "A process that holds it may be stopped or stuck: find it with lslocks, and end it.")


def stalled_error(url: str, part: Path, waited_s: float) -> DataError:
    what = f"another process fetches {url} into {part} and has made no progress for {waited_s:.0f} s"
    return DataError(what, "It may be stopped or stuck: find it with lslocks, and end it.")


def incomplete_error(url: str, num_bytes: int, found: int) -> DataError:
    return DataError(f"{url} should have {num_bytes} bytes, and {found} came", "Look at the file; it may be damaged.")


def digest_mismatch_error(url: str) -> DataError:
    what = f"{url} is damaged: its content does not match its digest"
    return DataError(what, "Upload the file again from its source.")
