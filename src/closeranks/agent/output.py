"""Where does what a worker prints go? Into its log, byte for byte, and line by line to whoever listens.

Invariant: a log that cannot be written (a full disk) is said once, never stops the run, and is written again once it
can be.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from pathlib import Path

from closeranks.core.appending import AppendFile

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 13
_CRASH_LEAD_LINES = 4


class OutputLog:
    """One process's stdout and stderr: the reading end of its pipe, and its log file."""

    def __init__(self, path: Path, on_line: Callable[[str], None], on_note: Callable[[str], None]) -> None:
        self.path = path
        self._on_note = on_note
        self._file = AppendFile(path, self._on_lost, self._on_back, is_lines=False)
        self._last = b""
        """The end of what was printed; the log itself may be out of reach."""
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self.is_open = True
        self._on_line = on_line
        # What a library prints need not be UTF-8; a character may be cut in two by a read.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def take_writer(self) -> int:
        """The writing end, for the process; whoever takes it closes it once the process has it."""
        writer, self._writer = self._writer, -1
        return writer

    @property
    def writer(self) -> int:
        """The writing end, for one process after another; it stays this log's."""
        return self._writer

    def read(self) -> bool:
        """Pass on what has arrived, one bounded read; False when there is nothing (more) now."""
        try:
            data = os.read(self.reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.is_open = bool(data)
        self._write(data)
        *lines, self._rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        for line in lines:
            self._on_line(line)
        return bool(data)

    def add(self, text: str) -> None:
        """Into the log alone, after what has been printed so far."""
        while self.is_open and self.read():
            pass
        self._write(text.encode())

    def end(self) -> None:
        """The process is gone: whatever is left in the pipe goes where it belongs, a last line without its end too."""
        while self.is_open and self.read():
            pass
        if self._rest:
            last, self._rest = self._rest, ""
            self._on_line(last)

    def close(self) -> None:
        """The descriptors are given back."""
        if self._writer >= 0:
            os.close(self.take_writer())
        self.end()
        os.close(self.reader)
        self._file.close()

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """The last words of this process."""
        lines = self._last.decode(errors="replace").splitlines()
        return last_words([line.rstrip() for line in lines if line.strip()], num_lines)

    def _write(self, data: bytes) -> None:
        if data:
            self._last = (self._last + data)[-_TAIL_BYTES:]
            self._file.write(data)

    def _on_lost(self, why: str) -> None:
        self._on_note(f"{self.path} cannot be written ({why}): the run goes on, and it is written once it can be.")

    def _on_back(self, num_dropped: int) -> None:
        lost = f"{num_dropped} bytes were lost" if num_dropped else "nothing was lost"
        self._on_note(f"{self.path} is written again; {lost}.")


def last_words(lines: list[str], num_lines: int) -> tuple[str, ...]:
    """The last lines; of a crash in native code its beginning, where the innermost calls stand, and what led to it."""
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    first = len(lines) - num_lines if crash is None else crash - _CRASH_LEAD_LINES
    return tuple(lines[max(0, first) :][:num_lines])
