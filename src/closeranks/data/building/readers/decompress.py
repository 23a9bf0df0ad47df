"""Reads files that may be compressed.

Invariant: a read returns the complete content, or raises an error that names the file and where it is damaged;
``tell_bytes`` returns how much of the file on disk has been consumed, by which progress is measured.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import open_binary

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
RATIO = 4
"""Compressed text is about a quarter of its content; the plan needs no better estimate."""
_CHUNK = 1 << 20
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


def compression_of(name: str) -> str:
    return COMPRESSIONS.get(Path(name).suffix.lower(), "")


def plain_name(name: str) -> str:
    """The name without the compression's suffix: ``part.jsonl`` for ``part.jsonl.gz``."""
    return name[: -len(Path(name).suffix)] if compression_of(name) else name


@dataclass(slots=True)
class DecompressedStream:
    content: BinaryIO
    _raw: BinaryIO

    def tell_bytes(self) -> int:
        return self._raw.tell()


@contextmanager
def open_stream(path: Path, shown: str, compression: str) -> Iterator[DecompressedStream]:
    """Its content from the beginning. ``shown``: the name that the user knows it by."""
    try:
        raw = open_binary(path, buffering=_CHUNK)
    except OSError as error:
        raise DataError(f"'{shown}' cannot be read: {error.strerror}", "Check its permissions.") from error
    with raw:
        try:
            yield DecompressedStream(_decompressed(raw, compression), raw)
        except _DAMAGE as error:
            raise DataError(f"'{shown}' is damaged: {_reason(error)}", "Fetch it again, or leave it out.") from error
        except OSError as error:
            if compression != "bz2" or error.errno is not None:  # bz2 reports damage by such an error
                raise
            raise DataError(f"'{shown}' is damaged: {_reason(error)}", "Fetch it again, or leave it out.") from error


def _reason(error: BaseException) -> str:
    return str(error).rstrip(".") or "it ends too early"


def _decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    if compression == "gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
    if compression == "bz2":
        return io.BufferedReader(bz2.BZ2File(raw), _CHUNK)
    if compression == "xz":
        return io.BufferedReader(lzma.LZMAFile(raw), _CHUNK)
    if compression == "zst":
        return io.BufferedReader(_Zstandard(raw), _CHUNK)
    return raw


class _Zstandard(io.RawIOBase):
    """zstandard's own reader takes a file that is truncated inside a frame for complete; this one does not."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            fix = "Install it: pip install zstandard, or closeranks[data]."
            raise DataError("files compressed with zstd need the package 'zstandard'", fix) from error
        self._raw = raw
        self._new: Any = zstandard.ZstdDecompressor().decompressobj
        self._damage = zstandard.ZstdError
        self._frame: Any = None
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _fill(self) -> bool:
        """Decompress the next piece; false at the end of the last frame."""
        left = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        data = left or self._raw.read(_CHUNK)
        if not data:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("it ends in the middle of a zstd frame")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._new()
        try:
            self._held = memoryview(self._frame.decompress(data))
        except self._damage as error:
            raise zlib.error(str(error)) from error
        return True
