"""Where in the user's own code did an error come from?

Invariant: the place named is one the person can edit, never a line of ours, of an installed package or of Python's.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_FOREIGN = tuple(
    {
        str(Path(__file__).resolve().parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def describe(error: BaseException) -> str:
    """``ValueError: bad row (dataset.py:12)``: type, message, and the innermost line of the user's code, if any."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_FOREIGN, "<")):
            return f"{message} ({frame.filename}:{frame.lineno})"
    return message
