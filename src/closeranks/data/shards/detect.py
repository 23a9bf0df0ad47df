"""Is a folder one of shards? By names where it can, so that a damaged or unfinished one is called that."""

from __future__ import annotations

from closeranks.data.files.protocol import Files
from closeranks.data.shards.manifest import NAME
from closeranks.data.shards.shard_format import SUFFIX

_BEGINNING = b'{"closeranks":"dataset"'


def is_shards(files: Files) -> bool:
    """Shards, finished or not; or the document of a data set that has none."""
    names = [info.name for info in files.list()]
    if any(name.endswith((SUFFIX, f"{SUFFIX}.part")) for name in names):
        return True
    return NAME in names and files.read(NAME).startswith(_BEGINNING)
