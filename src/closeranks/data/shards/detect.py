"""Detects whether a folder contains shards; by file names if possible, so that a damaged or unfinished data set is
reported as such."""

from __future__ import annotations

from closeranks.data.files.protocol import Files
from closeranks.data.shards.manifest import NAME
from closeranks.data.shards.shard_format import SUFFIX

_BEGINNING = b'{"closeranks":"dataset"'


def is_shards(files: Files) -> bool:
    """Whether there are shards, finished or not, or the manifest of a data set without any."""
    names = [info.name for info in files.list()]
    if any(name.endswith((SUFFIX, f"{SUFFIX}.part")) for name in names):
        return True
    return NAME in names and files.read(NAME).startswith(_BEGINNING)
