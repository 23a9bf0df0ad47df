"""The output of a worker: copied to its log byte for byte, and passed on as lines.

Invariants: a log that cannot be written (a full disk) is reported once, never stops the run, and is written again once
it can be; output costs the agent time in proportion to its length, a bounded piece at a time, and bounded memory: a
worker that prints faster than the agent reads waits for its pipe, and only that worker does.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from closeranks.core.system.append_file import AppendFile

_CHUNK_BYTES = 1 << 14
"""Size of one read: thousands of short lines take tens of milliseconds to show, and other workers wait meanwhile."""
_TAIL_BYTES = 1 << 13
_CRASH_LEAD_LINES = 4
_LINE_CHARS = 1 << 13
"""A longer line is shown in pieces of this length."""
_BAR_S = 5.0
"""How often a line that is redrawn with carriage returns (a progress bar) is shown while it is unfinished."""


class LineAssembler:
    """Bytes in, text to show out: whole lines, and the latest state of a line that is redrawn with carriage returns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at = -_BAR_S
        # What a library prints need not be UTF-8; a character may be cut in two by a read.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines to show now; an unfinished line is buffered, up to ``_LINE_CHARS``."""
        *lines, rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        shown = [_visible(line) for line in lines]
        if "\r" in rest:
            shown += self._redrawn(rest)
            rest = _visible(rest) + ("\r" if rest.endswith("\r") else "")
        whole = len(rest) - len(rest) % _LINE_CHARS
        shown += [rest[start : start + _LINE_CHARS] for start in range(0, whole, _LINE_CHARS)]
        self._rest = rest[whole:]
        return shown

    def finish(self) -> list[str]:
        """The last line, if it has no newline."""
        last, self._rest = _visible(self._rest), ""
        return [last] if last else []

    def _redrawn(self, rest: str) -> list[str]:
        """The newest state that is certainly complete, at most every ``_BAR_S``."""
        state, now = _visible(rest.rpartition("\r")[0]), self._clock()
        if not state.strip() or now - self._shown_at < _BAR_S:
            return []
        self._shown_at = now
        return [state]


def _visible(line: str) -> str:
    """Roughly what a terminal would show: the last state of a line that was redrawn with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


class OutputLog:
    """One process's stdout and stderr: the reading end of its pipe, and its log file."""

    def __init__(self, path: Path, on_text: Callable[[str], None], on_note: Callable[[str], None]) -> None:
        """``on_text`` is called once for each read, with one or more lines."""
        self.path = path
        self._on_note = on_note
        self._file = AppendFile(path, self._on_lost, self._on_back, is_lines=False)
        self._last = b""
        """The end of what was printed; the log itself may not be readable."""
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self._pipe_bytes = fcntl.fcntl(self.reader, fcntl.F_GETPIPE_SZ)
        self._num_passed = 0
        self._printing_at = 0.0
        self.is_open = True
        self._on_text = on_text
        self._lines = LineAssembler()

    def take_writer(self) -> int:
        """The writing end, for the process; the caller closes it once the process has it."""
        writer, self._writer = self._writer, -1
        return writer

    @property
    def writer(self) -> int:
        """The writing end, for successive processes; this log keeps ownership."""
        return self._writer

    def read(self) -> bool:
        """Pass on what has arrived, in one bounded read; False when there is nothing now."""
        self._note_printing()
        try:
            data = os.read(self.reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.is_open = bool(data)
        self._num_passed += len(data)
        self._write(data)
        self._show(self._lines.feed(data))
        return bool(data)

    def drain(self) -> None:
        """Pass on what is in the pipe now, and no more: a child that still holds the pipe might print for ever."""
        left = self._num_waiting()
        while left > 0 and self.is_open and (before := self._num_waiting()) and self.read():
            left -= min(before, _CHUNK_BYTES)

    @property
    def printing_at(self) -> float:
        """When (``time.monotonic()``) the process was last seen to spend its time printing: the pipe was so full that
        it may have blocked, or a pipe's capacity of bytes has arrived since the last time. A few lines do not count: a
        thread may print them while the process is stuck."""
        self._note_printing()
        return self._printing_at

    def _note_printing(self) -> None:
        # Half full by bytes may be full: short writes do not share a page.
        if self._num_passed >= self._pipe_bytes or 2 * self._num_waiting() >= self._pipe_bytes:
            self._num_passed, self._printing_at = 0, time.monotonic()

    def _num_waiting(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0])

    def _show(self, lines: list[str]) -> None:
        if lines:
            self._on_text("\n".join(lines))

    def add(self, text: str) -> None:
        """Write text to the log only, after what has been printed so far."""
        self.drain()
        self._write(text.encode())

    def finish(self) -> None:
        """The process is gone: pass on what is left in the pipe, including a last line without a newline."""
        self.drain()
        self._show(self._lines.finish())

    def move(self, folder: Path) -> None:
        """Move the log to another folder, with all that was printed so far."""
        self.path = folder / self.path.name
        self._file.move(self.path)

    def close(self) -> None:
        """Pass on what is left, and close the descriptors."""
        if self._writer >= 0:
            os.close(self.take_writer())
        self.finish()
        os.close(self.reader)
        self._file.close()

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines that the process printed."""
        lines = self._last.decode(errors="replace").splitlines()
        return log_excerpt([line.rstrip() for line in lines if line.strip()], num_lines)

    def _write(self, data: bytes) -> None:
        if data:
            self._last = (self._last + data)[-_TAIL_BYTES:]
            self._file.write(data)

    def _on_lost(self, why: str) -> None:
        self._on_note(f"{self.path} cannot be written ({why}): the run continues, and writing is retried.")

    def _on_back(self, num_dropped: int) -> None:
        lost = f"{num_dropped} bytes were lost" if num_dropped else "nothing was lost"
        self._on_note(f"{self.path} is written again; {lost}.")


def log_excerpt(lines: list[str], num_lines: int) -> tuple[str, ...]:
    """The last lines; for a crash in native code, the first lines of its dump, with the innermost calls, and a few
    lines before it."""
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    first = len(lines) - num_lines if crash is None else crash - _CRASH_LEAD_LINES
    return tuple(lines[max(0, first) :][:num_lines])
