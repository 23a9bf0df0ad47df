"""Verifies that every byte of a checkpoint is as it was saved.

Reads everything and compares all three digests of every chunk, the headers and sizes, and the safetensors headers with
the manifest. Invariant: every finding names its checkpoint, its file and, if it has one, its tensor; a damaged chunk
never prevents the check of the others. Bytes that several checkpoints share are read once. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from closeranks.checkpoint.format.digests import blake3_hex, layout_independent_digest
from closeranks.checkpoint.format.manifest import LATEST, MANIFEST, CheckpointManifest, ChunkLocation, DataFile
from closeranks.checkpoint.format.manifest_validation import coverage_gap
from closeranks.checkpoint.load.catalogue import Catalogue, FoundCheckpoint
from closeranks.checkpoint.load.chunk_reader import ChunkReader
from closeranks.core.errors import CheckpointError
from closeranks.storage.protocol import Storage, StorageError

_THREADS = 4

OnProgress = Callable[[int], None]
"""Called with the number of bytes verified since the last call."""


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    checkpoint: str
    file: str
    """Empty: the checkpoint as a whole."""
    tensor: str
    """``section/key``, or empty."""
    what: str
    is_damage: bool = True
    """False: a remark only, no saved data is in doubt."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.checkpoint, self.file, self.tensor, self.what) if part)


@dataclass(slots=True)
class VerifiedChunks:
    """Chunks verified so far, shared by all checkpoints of one verification."""

    chunks: dict[tuple[str, str, int, str, int, int], str] = field(default_factory=dict)
    """What is wrong with the bytes at a location, compared with these digests; empty: nothing."""
    num_bytes: int = 0
    num_chunks: int = 0


def verify(
    found: FoundCheckpoint, on_progress: OnProgress = lambda _: None, seen: VerifiedChunks | None = None
) -> list[VerifyFinding]:
    """Everything that is wrong with one checkpoint, worst first; empty: every byte is as it was saved."""
    seen = VerifiedChunks() if seen is None else seen
    if found.manifest is None:
        is_lost = found.status == "damaged" or (found.status == "unfinished" and found.is_latest)
        return [VerifyFinding(found.name, MANIFEST, "", found.problem, is_damage=is_lost)]
    findings = [VerifyFinding(found.name, LATEST, "", found.problem)] if found.status == "suspect" else []
    chunks = ChunkReader(found.storage, found.name, found.manifest)
    findings += _coverage(found.name, found.manifest)
    findings += _own_files(found, found.manifest, chunks)
    findings += _contents(found, found.manifest.entries, chunks, on_progress, seen)
    findings += _unknown_files(found.storage, found.name, found.manifest)
    return findings


def verify_all(
    catalogue: Catalogue, on_progress: OnProgress = lambda _: None, seen: VerifiedChunks | None = None
) -> list[VerifyFinding]:
    """Verify every checkpoint of a place, and report what is wrong with the place itself."""
    seen = VerifiedChunks() if seen is None else seen
    findings = [finding for found in catalogue for finding in verify(found, on_progress, seen)]
    return findings + [
        VerifyFinding("", "", "", issue.what, issue.is_damage) for issue in catalogue.problems if not issue.name
    ]


def num_bytes_to_verify(catalogue: Iterable[FoundCheckpoint]) -> int:
    """How many bytes there are to verify, for a progress bar."""
    chunks = {
        (found.storage.url, _place(found.name, entry), entry.offset): entry.chunk.num_bytes
        for found in catalogue
        if found.manifest is not None
        for entry in found.manifest.entries
    }
    return sum(chunks.values())


def _place(name: str, entry: ChunkLocation) -> str:
    return entry.file if "/" in entry.file else f"{name}/{entry.file}"


def _coverage(name: str, manifest: CheckpointManifest) -> Iterator[VerifyFinding]:
    for (section, key), entries in manifest.tensors().items():
        if wrong := coverage_gap(entry.chunk.piece for entry in entries):
            yield VerifyFinding(name, MANIFEST, f"{section}/{key}", wrong)


def _own_files(found: FoundCheckpoint, manifest: CheckpointManifest, chunks: ChunkReader) -> Iterator[VerifyFinding]:
    for file in manifest.files:
        try:
            chunks.check_file(file.name)
            own = [entry for entry in manifest.entries if entry.file == file.name]
            for wrong in _header_faults(found.storage, found.name, file, own):
                yield VerifyFinding(found.name, file.name, "", wrong)
        except CheckpointError as error:
            yield VerifyFinding(found.name, file.name, "", _without_path(error, chunks))
        except StorageError as error:
            yield VerifyFinding(found.name, file.name, "", f"it cannot be read: {error}")


def _header_faults(storage: Storage, folder: str, file: DataFile, entries: Sequence[ChunkLocation]) -> Iterator[str]:
    """Whether other programs that open the file see the same tensors as the manifest describes."""
    header = storage.read(f"{folder}/{file.name}", 0, file.header_bytes)
    if int.from_bytes(header[:8], "little") != file.header_bytes - 8:
        yield "its header length differs from the manifest"
        return
    try:
        rows = {name: row for name, row in json.loads(header[8:]).items() if name != "__metadata__"}
        held = {(name.rpartition("#")[0], *row["data_offsets"]) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield "its header is not that of a safetensors file"
        return
    for entry in entries:
        begin = entry.offset - file.header_bytes
        if (f"{entry.chunk.section}/{entry.chunk.key}", begin, begin + entry.chunk.num_bytes) not in held:
            yield f"its header has no {entry.chunk.section}/{entry.chunk.key} at byte {entry.offset}"


def _contents(
    found: FoundCheckpoint,
    entries: Sequence[ChunkLocation],
    chunks: ChunkReader,
    on_progress: OnProgress,
    seen: VerifiedChunks,
) -> list[VerifyFinding]:
    """Verify every chunk with a few threads: reading and digesting run without the GIL. Holds only a few chunks."""
    findings: list[VerifyFinding] = []
    num_threads = min(_THREADS, os.cpu_count() or 1)
    todo = iter(sorted(entries, key=lambda entry: (entry.file, entry.offset)))
    with ThreadPoolExecutor(num_threads, "verify") as pool:
        running: dict[Future[str], ChunkLocation] = {}
        while True:
            for entry in todo:
                if (wrong := seen.chunks.get(_content_key(found, entry))) is None:
                    running[pool.submit(_fault, entry, chunks)] = entry
                elif wrong:
                    findings.append(_finding(found.name, entry, wrong))
                if len(running) > num_threads:
                    break
            if not running:
                return findings
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                entry, wrong = running.pop(done), done.result()
                seen.chunks[_content_key(found, entry)] = wrong
                seen.num_bytes += entry.chunk.num_bytes
                seen.num_chunks += 1
                on_progress(entry.chunk.num_bytes)
                if wrong:
                    findings.append(_finding(found.name, entry, wrong))


def _content_key(found: FoundCheckpoint, entry: ChunkLocation) -> tuple[str, str, int, str, int, int]:
    """The location of the bytes and the digests they are compared with."""
    place = _place(found.name, entry)
    return found.storage.url, place, entry.offset, entry.blake3, entry.chunk.crc32c, entry.digest_term


def _finding(name: str, entry: ChunkLocation, what: str) -> VerifyFinding:
    return VerifyFinding(name, entry.file, f"{entry.chunk.section}/{entry.chunk.key}", what)


def _fault(entry: ChunkLocation, chunks: ChunkReader) -> str:
    """What is wrong with a chunk's bytes; empty: nothing."""
    try:
        chunks.check_extent(entry)  # before memory is allocated for it
        data = np.empty(entry.chunk.num_bytes, np.uint8).data  # in huge pages, unlike a plain bytes object
        chunks.read_into(entry, data)
    except CheckpointError as error:
        return _without_path(error, chunks)
    if blake3_hex(data) != entry.blake3:
        return f"the bytes from {entry.offset} on match their CRC32C but not their BLAKE3"
    if layout_independent_digest(data, entry.chunk.dtype, entry.chunk.piece) != entry.digest_term:
        return f"the bytes from {entry.offset} on do not match their layout-independent digest"
    return ""


def _without_path(error: CheckpointError, chunks: ChunkReader) -> str:
    """The message without the checkpoint's name, since every finding begins with it."""
    return error.what.removeprefix(f"checkpoint {chunks.path} is damaged: ").removeprefix(f"checkpoint {chunks.path}: ")


def _unknown_files(storage: Storage, name: str, manifest: CheckpointManifest) -> Iterator[VerifyFinding]:
    known = {MANIFEST, *(file.name for file in manifest.files)}
    try:
        for unknown in sorted(set(storage.names(name)) - known):
            yield VerifyFinding(name, unknown, "", "not part of this checkpoint", is_damage=False)
    except StorageError as error:
        yield VerifyFinding(name, "", "", f"its folder cannot be listed: {error}")
