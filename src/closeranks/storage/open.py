"""Opens the storage that a path or URL names.

A path or ``file://`` URL is a folder on a disk; every other URL goes to fsspec, which is imported only then.
"""

from __future__ import annotations

from pathlib import Path

from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import Storage

_LOCAL = ("file://", "local://")


def absolute(place: str) -> str:
    """The same place for a process with another working folder."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def open_storage(place: str | Path) -> Storage:
    """Makes no request and creates no folder; ``SetupError`` for a URL whose protocol is unknown or not installed."""
    text = str(place)
    for prefix in _LOCAL:
        if text.startswith(prefix):
            return LocalStorage(Path(text.removeprefix(prefix)))
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    from closeranks.storage.object_store.remote import RemoteStorage

    return RemoteStorage(text)
