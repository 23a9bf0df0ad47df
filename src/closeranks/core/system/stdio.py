"""Standard output and standard error for a process that must not fail because nobody reads what it prints.

A run continues when its terminal is gone, its pipe has no reader or its log is on a full disk; everything is in the run
folder as well. Invariants: after ``install_streams(required=False)`` no write to ``sys.stdout`` or ``sys.stderr``
raises; after ``open_closed_stdio`` descriptors 0, 1 and 2 are open, so that no file or socket of ours is ever mistaken
for one of them.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import time
from typing import TYPE_CHECKING, TextIO

from closeranks.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer

READER_GONE = 141
"""Exit status of a command that ended because nobody reads its output: what a shell shows for SIGPIPE."""
_DISCONNECTED = frozenset({errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.EBADF, errno.ENXIO, errno.ENODEV})
"""The reader will not come back. Any other error, such as a full disk, may be temporary: later writes are tried."""


class StandardStream(io.RawIOBase):
    """One standard stream. ``required``: a write that fails raises, which ends the caller. Otherwise it is dropped.

    ``timeout_s``: how long a reader that is connected but does not read (a stopped terminal, a stalled ssh connection,
    a pager) may block this process; the bytes it misses are counted and reported when it reads again.
    """

    def __init__(self, fd: int, *, required: bool, timeout_s: float | None = None) -> None:
        self._fd = fd
        self._required = required
        self._timeout_s = timeout_s
        self._writing_fd = fd if timeout_s is None else _nonblocking(fd)
        self._num_missed = 0

    @property
    def name(self) -> str:
        return {1: "<stdout>", 2: "<stderr>"}.get(self._fd, str(self._fd))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: ReadableBuffer) -> int:
        piece = memoryview(data).cast("B")
        try:
            if self._num_missed:
                self._write_missed()
            self._write_all(piece)
        except BlockingIOError:  # a reader is connected but does not read
            self._num_missed += len(piece)
        except OSError as error:
            self._handle_error(error)
        return len(piece)

    def _write_all(self, piece: memoryview) -> None:
        left, until = piece, None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while left:
            try:
                left = left[os.write(self._writing_fd, left) :]
            except BlockingIOError:
                if not self._wait(until):
                    raise

    def _wait(self, until: float | None) -> bool:
        """Wait for room to write; after a wait in vain, do not wait again until the reader reads."""
        if self._num_missed:
            return False
        poller = select.poll()
        poller.register(self._writing_fd, select.POLLOUT)
        left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
        return bool(poller.poll(left_ms))

    def _write_missed(self) -> None:
        text = f"\n[{self._num_missed} bytes were not shown: nobody read them; they are in the run's logs]\n".encode()
        self._write_all(memoryview(text))
        self._num_missed = 0

    def _handle_error(self, error: OSError) -> None:
        if error.errno in _DISCONNECTED or self._required:
            _redirect_to_null(self._fd)
            self._writing_fd = self._fd
        if not self._required:
            return
        if error.errno in _DISCONNECTED:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
        fix = "Free some space, or write somewhere else."
        raise SetupError(f"{self.name.strip('<>')} cannot be written ({error.strerror})", fix) from error


def open_closed_stdio() -> None:
    """Standard descriptors that the parent process closed (``>&-``) become /dev/null."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            _redirect_to_null(fd)


def install_streams(
    names: Iterable[str] = ("stdout", "stderr"), *, required: bool, timeout_s: float | None = None
) -> None:
    """Put a ``StandardStream`` under ``sys.stdout`` and ``sys.stderr``; streams that were replaced (by a notebook, by a
    test) are left alone. Safe to call again."""
    open_closed_stdio()
    for name in names:
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the rest of the process
        elif isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _wrapped(stream, {"stdout": 1, "stderr": 2}[name], required, timeout_s))


def ignore_broken_pipes(timeout_s: float | None = None) -> None:
    """From now on this process survives when its output is no longer read."""
    install_streams(required=False, timeout_s=timeout_s)


def _wrapped(stream: io.TextIOWrapper, fd: int, required: bool, timeout_s: float | None) -> TextIO:
    output = StandardStream(fd, required=required, timeout_s=timeout_s)
    try:
        stream.flush()
    except OSError as error:
        if error.errno in _DISCONNECTED:
            _redirect_to_null(fd)
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _redirect_to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == fd:
        os.set_inheritable(fd, True)
        return
    os.dup2(null, fd)
    os.close(null)


def _nonblocking(fd: int) -> int:
    """The same terminal or pipe, opened again: the flag belongs to the open file, which other processes share. Files
    never block, and sockets cannot be opened again: those stay as they are."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and os.isatty(fd))):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # another user's terminal (su, sudo)
        return fd
