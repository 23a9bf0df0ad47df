"""Finds the chunks that an incremental save need not write, because an earlier checkpoint holds the same bytes.

The base is the newest certified checkpoint of the same place. A chunk of it is a candidate if everything that is free
to compare is equal, including the checksum from the source; it becomes a reference if its BLAKE3 is equal too.
Invariants: a reference points at bytes, never at another reference; a base that is damaged, or whose files are gone,
yields no references, and everything is written. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from blake3 import blake3

from closeranks.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    CheckpointManifest,
    Chunk,
    ChunkLocation,
    as_reference,
    decode_latest,
    decode_manifest,
)
from closeranks.core.errors import CheckpointError
from closeranks.storage.protocol import MissingError, Storage, StorageError


def read_base_manifest(storage: Storage) -> CheckpointManifest | None:
    """The manifest that ``latest`` names, if both are valid; else None."""
    try:
        latest = decode_latest(storage.read(LATEST), LATEST)
        path = f"{latest.name}/{MANIFEST}"
        data = storage.read(path)
        if blake3(data).hexdigest() != latest.blake3:
            return None
        return decode_manifest(data, path)
    except (StorageError, CheckpointError):
        return None  # no references: costs more bytes, and a real error shows up when this save writes


def reference_candidates(base: CheckpointManifest, chunks: Sequence[Chunk]) -> dict[int, ChunkLocation]:
    """By index of the chunk: the location in the base of bytes that may be the same."""
    entries = {entry.chunk: entry for entry in base.entries}
    return {
        number: as_reference(entries[chunk], base.name)
        for number, chunk in enumerate(chunks)
        if chunk.num_bytes and chunk in entries
    }


def existing_references(storage: Storage, found: Mapping[int, ChunkLocation]) -> dict[int, ChunkLocation]:
    """The entries whose files still exist and are long enough."""
    missing = set(missing_files(found.values(), storage.size))
    return {number: entry for number, entry in found.items() if entry.file not in missing}


def missing_files(entries: Iterable[ChunkLocation], size: Callable[[str], int]) -> list[str]:
    """The files of other checkpoints that are missing, or too short for what must be read from them."""
    needed: dict[str, int] = {}
    for entry in entries:
        if "/" in entry.file:
            needed[entry.file] = max(needed.get(entry.file, 0), entry.offset + entry.chunk.num_bytes)
    return [file for file, num_bytes in needed.items() if _size(file, size) < num_bytes]


def _size(file: str, size: Callable[[str], int]) -> int:
    try:
        return size(file)
    except MissingError:
        return -1
