"""Where in the user's own code did an error come from?

Invariant: the place named is one the person can edit, never a line of ours, of an installed package or of Python's,
as long as the error passed through any such line.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from traceback import FrameSummary


def own_frame(error: BaseException) -> FrameSummary | None:
    """The innermost frame of the user's code that the error passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_foreign_folders()):
            return frame
    return None


def describe(error: BaseException) -> str:
    """``ValueError: bad row (dataset.py:12)``: type, message on one line, and the user's line, if there is one."""
    frame = own_frame(error)
    return f"{sentence(error)} ({shown(frame.filename)}:{frame.lineno})" if frame else sentence(error)


def sentence(error: BaseException) -> str:
    """Kind and message of an error on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shown(path: str) -> str:
    """Relative to the working folder where that is shorter."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


@cache
def _foreign_folders() -> tuple[str, ...]:
    package = str(Path(__file__).resolve().parents[1])
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (package, *sorted(installed), "<")
