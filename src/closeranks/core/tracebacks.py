"""Finds the place in the user's own code that an error came from.

Invariant: the place named is one the user can edit, never a line of ours, of an installed package or of Python's, as
long as the error passed through any such line.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from traceback import FrameSummary

from closeranks.core.printable import printable

MAX_MESSAGE_CHARS = 2_000


def user_frame(error: BaseException) -> FrameSummary | None:
    """The innermost frame of the user's code that the error passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return frame
    return None


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's: not ours, not an installed package's, not Python's."""
    return not filename.startswith(_foreign_folders())


def is_package_file(filename: str) -> bool:
    return filename.startswith(_package())


def describe_error(error: BaseException) -> str:
    """``ValueError: bad row (dataset.py:12)``: type, message on one line, and the user's line, if there is one."""
    frame = user_frame(error)
    return (
        f"{one_line_error(error)} ({display_path(frame.filename)}:{frame.lineno})" if frame else one_line_error(error)
    )


def one_line_error(error: BaseException) -> str:
    """Kind and message of an error on one line."""
    message = " ".join(printable_message(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def printable_message(error: BaseException) -> str:
    """``str(error)`` as text that any terminal, log or JSON line can take: bounded, and printable.

    An exception of the user's may carry a whole tensor, bytes that are no text, terminal escapes, or a ``__str__`` that
    raises; none of these may hide the error itself.
    """
    try:
        text = str(error)
    except Exception as failure:
        return f"(its message cannot be shown: __str__ raised {type(failure).__name__})"
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}... ({len(text):,} characters in all)"
    return printable(text)


def display_path(path: str) -> str:
    """Relative to the working folder if it lies inside; URLs are unchanged."""
    if "://" in path:
        return path
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the working folder was removed
        return path
    return path if relative.startswith("..") else relative


@cache
def _package() -> str:
    return str(Path(__file__).resolve().parents[1])


@cache
def _foreign_folders() -> tuple[str, ...]:
    package = _package()
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (package, *sorted(installed), "<")
