"""Which line of the user's own code does an error come from?

Invariant: the line named is one the user wrote: the deepest frame outside torch, this package and the standard library,
or else where the callable is defined.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def blamed_line(error: BaseException, source: Callable[..., Any]) -> str:
    """``file.py:12`` for an error that calling ``source`` raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}"
    return defined_at(source)


def defined_at(source: Callable[..., Any]) -> str:
    """``file.py:12`` where a callable is defined; its name where Python cannot tell."""
    code = getattr(inspect.unwrap(source), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1]}"
    except (TypeError, OSError):
        return getattr(source, "__qualname__", repr(source))


def sentence(error: BaseException) -> str:
    """Kind and message of an error on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _is_users(filename: str) -> bool:
    if filename.startswith(("<", _PACKAGE, _TORCH)):
        return False
    # Installed packages live below the standard library's folder, and a user's code may be one of them.
    return not filename.startswith(_STDLIB) or "site-packages" in filename
