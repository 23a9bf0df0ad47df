"""A file that a run appends to for its whole life, whatever happens to the disk meanwhile.

A write that fails is buffered in memory and retried with a later one; a file or folder that was removed is created
again. Invariants: ``write`` never raises; a failure is reported once, and so is its end; a partial write is completed
later, so that a full disk never leaves a torn line; a torn line left by an earlier process is terminated before the
first write.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

RETRY_S = 0.5
"""Minimum time between two attempts on a file that cannot be written."""
HELD_BYTES = 1 << 20
"""Size of the buffer in memory meanwhile; beyond it, the oldest data is dropped."""


class AppendFile:
    """``on_lost`` is called with the reason when the file cannot be written, ``on_back`` with the number of bytes
    dropped when it can be written again."""

    def __init__(
        self,
        path: Path,
        on_lost: Callable[[str], None],
        on_back: Callable[[int], None] = lambda num_dropped: None,
        *,
        must_open: bool = False,
        is_lines: bool = True,
    ) -> None:
        """``must_open``: raise the ``OSError`` if the file cannot be opened now. ``is_lines``: terminate a line that
        was left torn."""
        self.path = path
        self._on_lost, self._on_back = on_lost, on_back
        self._is_lines = is_lines
        self._file: int | None = None
        self._held: deque[bytes] = deque()
        self._num_held = self._num_dropped = 0
        self._is_closed = self._is_cut = False
        """Cut: whether the oldest buffered entry is the rest of one that was partly written."""
        self._retry_at: float | None = None
        """When to try again after a failure; None while writes succeed."""
        try:
            self._open()
        except OSError as error:
            if must_open:
                self._close()
                raise
            self._fail(error)

    def write(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._held.append(data)
        self._num_held += len(data)
        if self._retry_at is None or time.monotonic() >= self._retry_at:
            self._flush()
        self._drop_oldest()

    @property
    def num_bytes(self) -> int | None:
        """Size of the file; None if it cannot be told, or while something is buffered."""
        if self._file is None or self._held:
            return None
        try:
            return os.fstat(self._file).st_size
        except OSError:
            return None

    def move(self, path: Path) -> None:
        """Continue at the end of another file; the content of this one is moved there."""
        if self._is_closed or path == self.path:
            return
        old, self.path = self.path, path
        self._close()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                with old.open("rb") as source, path.open("ab") as target:
                    shutil.copyfileobj(source, target)
                old.unlink()
            elif old.exists():
                shutil.move(old, path)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Tries once more to write what is buffered."""
        if self._held and not self._is_closed:
            self._flush()
        self._is_closed = True
        self._close()

    def _flush(self) -> None:
        try:
            if self._file is None or os.fstat(self._file).st_nlink == 0:  # the file was removed meanwhile
                self._open()
            assert self._file is not None
            while self._held:
                self._take(os.write(self._file, self._held[0]))
        except OSError as error:
            self._fail(error)
        else:
            if self._retry_at is not None:
                self._retry_at, num_dropped, self._num_dropped = None, self._num_dropped, 0
                self._on_back(num_dropped)

    def _take(self, num_bytes: int) -> None:
        """Mark this many bytes of the oldest entry as written. A full disk accepts part of a write without an error."""
        if num_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = self._held.popleft()
        self._num_held -= num_bytes
        self._is_cut = num_bytes < len(data)
        if self._is_cut:
            self._held.appendleft(data[num_bytes:])

    def _fail(self, error: OSError) -> None:
        is_news = self._retry_at is None
        self._close()
        self._retry_at = time.monotonic() + RETRY_S
        if is_news:
            self._on_lost(error.strerror or str(error))

    def _drop_oldest(self) -> None:
        while self._num_held > HELD_BYTES and len(self._held) > 1:
            self._drop()

    def _drop(self) -> None:
        dropped = len(self._held.popleft())
        self._num_held -= dropped
        self._num_dropped += dropped
        self._is_cut = False

    def _open(self) -> None:
        self._close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not self._is_lines:
            return
        size = os.fstat(self._file).st_size
        is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        if is_torn and not self._is_cut:
            os.write(self._file, b"\n")
        elif self._is_cut and not is_torn:  # another file: the rest of a line alone is useless
            self._drop()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
