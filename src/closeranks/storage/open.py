"""Which storage does a place name?

A path or ``file://`` URL is a folder on a disk; every other URL goes to fsspec, which is imported only then.
"""

from __future__ import annotations

from pathlib import Path

from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import Storage

_LOCAL = ("file://", "local://")


def absolute(place: str) -> str:
    """The same place for a process whose working folder is another, or will be."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def open_storage(place: str | Path) -> Storage:
    """Makes no request and no folder; ``SetupError`` for a URL of unknown or uninstalled kind."""
    text = str(place)
    for prefix in _LOCAL:
        if text.startswith(prefix):
            return LocalStorage(Path(text.removeprefix(prefix)))
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    from closeranks.storage.object_store.remote import RemoteStorage

    return RemoteStorage(text)
