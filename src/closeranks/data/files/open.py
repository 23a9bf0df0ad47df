"""Opens the data files that a path or URL names.

A path or ``file://`` URL is on a local disk; every other URL goes through fsspec and a cache on this host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from closeranks.data.files.cache import FileCache
from closeranks.data.files.local import LocalFiles
from closeranks.data.files.protocol import Files
from closeranks.data.files.remote import RemoteFiles
from closeranks.storage.open import open_storage

CACHE = "~/.cache/closeranks/data"


def open_files(
    path: str, *, cache: str = "", cache_bytes: int = 64 << 30, digests: Mapping[str, str] | None = None
) -> Files:
    """Makes no request. ``digests``: BLAKE3 by name, compared with what is fetched; files on a local disk are not
    compared. ``SetupError`` for a URL whose protocol is unknown or not installed."""
    storage = open_storage(path)
    if storage.is_local:
        return LocalFiles(Path(storage.url))
    return RemoteFiles(path, FileCache(Path(cache or CACHE).expanduser().absolute(), cache_bytes), digests)
