"""Reads the bytes of saved chunks and checks that they are the ones that were saved.

Fetches chunks from where the manifest says they lie, into the caller's memory if that saves a copy. Invariant: the
returned bytes match the CRC32C that was taken from the training process's memory, and lie in a file that is long enough
and, if it is one of this checkpoint's own, has the size and header it was saved with. Thread-safe; reading and checking
run without the GIL. Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

from closeranks.checkpoint.format.digests import crc32c
from closeranks.checkpoint.format.manifest import CheckpointManifest, ChunkLocation, DataFile
from closeranks.checkpoint.format.manifest_validation import FIX
from closeranks.core.errors import CheckpointError
from closeranks.core.system.regular_file import open_binary
from closeranks.storage.protocol import MissingError, Storage, StorageError


class ChunkReader:
    """The files of one checkpoint, and those of others that it refers to."""

    def __init__(self, storage: Storage, folder: str, manifest: CheckpointManifest) -> None:
        self.path = f"{storage.url}/{folder}"
        self._storage, self._folder = storage, folder
        self._own = {file.name: file for file in manifest.files}
        self._sizes: dict[str, int] = {}
        self._lock = Lock()

    def file_path(self, file: str) -> str:
        """Path in the storage of a file of this checkpoint, or of one it refers to."""
        return file if "/" in file else f"{self._folder}/{file}"

    def check_file(self, file: str) -> int:
        """Its size; checked once per file, together with the header if it is one of the checkpoint's own."""
        with self._lock:
            if file not in self._sizes:
                self._sizes[file] = self._file_size(file)
            return self._sizes[file]

    def check_extent(self, entry: ChunkLocation) -> None:
        """Check that the chunk's file exists and is long enough for the chunk."""
        num_bytes = self.check_file(entry.file)
        if entry.offset + entry.chunk.num_bytes > num_bytes:
            place = f"'{entry.chunk.section}/{entry.chunk.key}' lies beyond the {num_bytes} bytes"
            raise self._damaged(f"{place} of {self.file_path(entry.file)}")

    def read(self, entry: ChunkLocation) -> bytes:
        """All bytes of a chunk."""
        self.check_extent(entry)
        try:
            data = self._storage.read(self.file_path(entry.file), entry.offset, entry.chunk.num_bytes)
        except StorageError as error:
            raise self._unreadable(entry.file, error) from error
        self._check(entry, memoryview(data))
        return data

    def read_into(self, entry: ChunkLocation, memory: memoryview) -> None:
        """All bytes of a chunk, into memory of exactly its size: from a disk without an intermediate copy."""
        if not self._storage.is_local:
            memory[:] = self.read(entry)
            return
        self.check_extent(entry)
        try:
            with open_binary(Path(self._storage.url) / self.file_path(entry.file), buffering=0) as file:
                _fill(file.fileno(), memory, entry.offset)
        except OSError as error:
            raise self._unreadable(entry.file, error) from error
        self._check(entry, memory)

    def _check(self, entry: ChunkLocation, data: memoryview) -> None:
        if data.nbytes != entry.chunk.num_bytes or crc32c(data) != entry.chunk.crc32c:
            what = f"'{entry.chunk.section}/{entry.chunk.key}' does not match its digest"
            raise self._damaged(f"{what} in {self.file_path(entry.file)}, from byte {entry.offset} on")

    def _file_size(self, file: str) -> int:
        try:
            num_bytes = self._storage.size(self.file_path(file))
            own = self._own.get(file)
            if own is not None:
                self._check_own(own, num_bytes)
        except MissingError as error:
            raise self._damaged(f"its file {self.file_path(file)} is missing") from error
        except StorageError as error:
            raise self._unreadable(file, error) from error
        return num_bytes

    def _check_own(self, file: DataFile, num_bytes: int) -> None:
        if num_bytes != file.num_bytes:
            raise self._damaged(f"{file.name} has {num_bytes} bytes and was saved with {file.num_bytes}")
        if crc32c(self._storage.read(self.file_path(file.name), 0, file.header_bytes)) != file.header_crc32c:
            raise self._damaged(f"the header of {file.name} does not match its digest")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} is damaged: {what}", FIX)

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path}: {self.file_path(file)} cannot be read: {error}", FIX)


def _fill(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < memory.nbytes:
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise OSError(f"it ends {memory.nbytes - done} bytes early")
        done += count
