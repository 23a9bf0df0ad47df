"""Lists the files below a place, with their sizes and a version that changes with the content.

Every file system reports these differently; here they become entries. Invariants: nothing is silently left out except
hidden files (a broken link and a name that cannot be used are errors); each page of a long listing is retried on its
own, since a store that throttles one request in twenty could otherwise never list a hundred pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from closeranks.core.system.regular_file import regular_stat
from closeranks.storage.errors import disk_error
from closeranks.storage.names import check_name, is_visible
from closeranks.storage.object_store.connection import FsspecConnection
from closeranks.storage.protocol import FileEntry, MissingError, StorageError

Ask = Callable[[Callable[[], Any], str, str], Any]
"""Runs a request with retries: (request, doing, name)."""

_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "md5Hash", "content_md5", "checksum", "Content-MD5", "Digest")
_TIME_KEYS = ("LastModified", "last_modified", "Last-Modified", "mtime", "modified", "updated", "created")
_WEB = ("http://", "https://")


def version_of(info: Mapping[str, Any]) -> str:
    """The store's own version of the content (ETag or the like), else the modification time. Quotes and the weak-tag
    prefix are removed: listings and read responses differ in them."""
    value = next((info[key] for key in (*_VERSION_KEYS, *_TIME_KEYS) if info.get(key)), "")
    if isinstance(value, datetime):  # fsspec's memory:// reports a date here and seconds there for the same file
        value = value.timestamp()
    return str(value).removeprefix("W/").strip('"')


def to_entry(name: str, info: Mapping[str, Any], url: str) -> FileEntry:
    if info.get("size") is None:
        raise StorageError(f"{url} does not report its size, so a truncated read could not be detected")
    return FileEntry(name, int(info["size"]), version_of(info))


def is_visible_path(name: str) -> bool:
    return all(is_visible(part) for part in name.split("/"))


def list_s3(connection: FsspecConnection, url: str, request: Ask) -> list[FileEntry]:
    bucket, key, _ = connection.fs.split_path(connection.root)
    prefix = f"{key}/" if key else ""
    found = ((str(info["Key"])[len(prefix) :], info) for info in _pages(connection.fs, bucket, prefix, request))
    shown = ((name, info) for name, info in found if name and not name.endswith("/") and is_visible_path(name))
    return _sorted(FileEntry(check_name(name), int(info["Size"]), version_of(info)) for name, info in shown)


def _pages(fs: Any, bucket: str, prefix: str, request: Ask) -> Iterator[Mapping[str, Any]]:
    where: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, **fs.req_kw}
    while True:
        page = request(partial(fs.call_s3, "list_objects_v2", **where), "listing", "")
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        where["ContinuationToken"] = page["NextContinuationToken"]


def list_fsspec(connection: FsspecConnection, url: str, request: Ask) -> list[FileEntry]:
    """Some file systems (plain HTTP) list names alone: their files are queried one by one. Walking folders skips
    errors, so that a place which cannot be reached looks empty."""
    found: Mapping[str, Mapping[str, Any]] = request(
        lambda: connection.fs.find(f"{connection.root}/", detail=True), "listing", ""
    )
    if not found:
        _check_reached(connection, url, request)
    entries = []
    for path, info in found.items():
        name = path.removeprefix(connection.root).lstrip("/")
        if not name or not is_visible_path(name) or info.get("type", "file") != "file":
            continue
        if info.get("size") is None:
            info = request(partial(connection.fs.info, path), "looking for", name)
        entries.append(to_entry(check_name(name), info, f"{url}/{name}"))
    return _sorted(entries)


def _check_reached(connection: FsspecConnection, url: str, request: Ask) -> None:
    """Raises the skipped error. A missing folder is empty in most stores, and a wrong address on a web server."""
    try:
        request(lambda: connection.fs.ls(f"{connection.root}/", detail=False), "listing", "")
    except MissingError:
        if url.startswith(_WEB):
            raise


def list_disk(root: Path) -> list[FileEntry]:
    """Links are followed, also to folders; a link to a parent folder is not followed further."""
    entries: list[FileEntry] = []
    try:
        _walk(str(root), "", frozenset(), entries)
    except FileNotFoundError as error:
        if not root.exists():
            return []
        raise disk_error(error, "listing", error.filename or root) from error
    except OSError as error:
        raise disk_error(error, "listing", error.filename or root) from error
    return _sorted(entries)


def _walk(folder: str, prefix: str, above: frozenset[tuple[int, int]], entries: list[FileEntry]) -> None:
    here = os.stat(folder)
    mark = (here.st_dev, here.st_ino)
    if mark in above:
        return
    with os.scandir(folder) as found:
        for child in found:
            if not is_visible(child.name):
                continue
            if child.is_dir():
                _walk(child.path, f"{prefix}{child.name}/", above | {mark}, entries)
            else:
                # A broken link, a pipe or a device raises: a shard that cannot be read must not go unnoticed.
                stat = child.stat() if child.is_file() else regular_stat(child.path)
                entries.append(FileEntry(prefix + child.name, stat.st_size, str(stat.st_mtime_ns)))


def _sorted(entries: Iterable[FileEntry]) -> list[FileEntry]:
    return sorted(entries, key=lambda entry: entry.name)
