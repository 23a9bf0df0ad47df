"""Compresses the trace of one rank into its file, of bounded size.

Invariants: the file appears whole or not at all; a trace that would be too large ends early, between two of its events,
is marked as cut, and is still valid JSON.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

MOST_BYTES = 256 << 20
"""Of one rank's trace before compression: about a million events."""
METADATA = "closeranks"
"""Where a trace holds what we add to it."""
IS_CUT = "closeranks_is_cut"
_LEVEL = 3
"""Training shares the processors; a higher level takes twice as long and saves a tenth."""
_CHUNK_BYTES = 1 << 20
_EVENT_END = b"\n  },"
"""How torch ends an event that is not the last one."""
_END = b'\n  }\n  ],\n  "%s": true\n}\n' % IS_CUT.encode()


def write_trace(raw: Path, path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Compress what torch wrote to ``raw``, and remove it. ``OSError`` if there is no room."""
    unfinished = path.with_name(f".{path.name}")
    try:
        _check_whole(raw)
        with raw.open("rb") as source, gzip.open(unfinished, "wb", compresslevel=_LEVEL) as target:
            if os.fstat(source.fileno()).st_size <= most_bytes:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
            else:
                _copy_cut(source, target, most_bytes)
        unfinished.replace(path)
    except zlib.error as error:
        raise OSError(errno.EIO, str(error)) from error
    finally:
        for left in (unfinished, raw):
            with suppress(OSError):
                left.unlink(missing_ok=True)


def failure_file(path: Path, request: str) -> Path:
    """Says why there is no trace at ``path``."""
    return path.with_name(f"{path.name}.{request}.failed")


def _check_whole(raw: Path) -> None:
    """torch does not say that the disk is full."""
    with raw.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy_cut(source: IO[bytes], target: gzip.GzipFile, most_bytes: int) -> None:
    left, last = most_bytes, b""
    while left > 0:
        target.write(last)
        last = source.read(min(_CHUNK_BYTES, left))
        left -= len(last)
    end = last.rfind(_EVENT_END)
    if end < 0:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    target.write(last[:end])
    target.write(_END)
