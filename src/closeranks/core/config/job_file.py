"""Finds and reads a job file.

Invariant: every way a path can be wrong (missing, a folder, a device, too large, unreadable, not UTF-8) is a
``Problem`` with its fix, found in bounded time and memory; no exception of the operating system escapes.
"""

from __future__ import annotations

import os
import stat
import time
from difflib import get_close_matches
from pathlib import Path

from closeranks.core.config.toml.parser import JobText, read_toml
from closeranks.core.errors import Problem

_MAX_BYTES = 1 << 20
_POLL_S = 0.02
_PIPE_S = 10.0
"""How long a pipe, such as bash's <(...), may stay silent."""


class _UnreadableError(ValueError):
    """What the path leads to is not a job file."""


def read_job_file(path: Path) -> JobText:
    """Read the job file at a path; problems that prevent reading it are part of the result."""
    try:
        content = _read_bounded(path)
    except FileNotFoundError:
        return _unread(path, f"no job file at {path}", _nearby(path))
    except IsADirectoryError:
        return _unread(path, f"{path} is a folder, not a job file", _inside(path))
    except _UnreadableError as error:
        return _unread(path, f"{path} {error}", "Name a text file of TOML.")
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        return _unread(path, f"the job file {path} cannot be read: {reason}", "Check the path and its permissions.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"the job file is not UTF-8 text (byte {error.start}, line {line})"
        return _unread(path, what, "Save it again with the encoding UTF-8.")
    return read_toml(text.replace("\r\n", "\n"), path.name)


def _read_bounded(path: Path) -> bytes:
    """Never waits for a pipe that nobody writes to, and never reads without bound."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise _UnreadableError("is a device, not a file")
        return _read_all(fd, is_pipe=stat.S_ISFIFO(mode))
    finally:
        os.close(fd)


def _read_all(fd: int, *, is_pipe: bool) -> bytes:
    content, until = bytearray(), time.monotonic() + _PIPE_S
    while len(content) <= _MAX_BYTES:
        try:
            piece = os.read(fd, 1 << 16)
            is_over = not piece and (bool(content) or not is_pipe)
        except BlockingIOError:
            piece, is_over = b"", False
        if is_over:
            return bytes(content)
        if piece:
            content += piece
            until = time.monotonic() + _PIPE_S
        elif time.monotonic() > until:
            raise _UnreadableError(f"is a pipe into which nothing was written for {_PIPE_S:g} s")
        else:
            time.sleep(_POLL_S)
    raise _UnreadableError(f"holds more than the {_MAX_BYTES >> 20} MiB that a job may have")


def _unread(path: Path, what: str, fix: str) -> JobText:
    return JobText(path.name, problems=(Problem(path.name or str(path), what, fix),), is_whole=False)


def _toml_files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".toml")
    except OSError:
        return []


def _nearby(path: Path) -> str:
    """A file in the same folder that was probably meant."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    files = _toml_files(path.parent)
    near = get_close_matches(path.name, files, n=1, cutoff=0.5) or (files if len(files) == 1 else [])
    if near:
        return f"Did you mean '{path.parent / near[0]}'?"
    return f"The job files there are: {', '.join(files)}." if files else "There are no *.toml files in that folder."


def _inside(folder: Path) -> str:
    files = _toml_files(folder)
    if not files:
        return "Give the path of a *.toml file."
    return f"Did you mean {' or '.join(repr(str(folder / name)) for name in files[:3])}?"
