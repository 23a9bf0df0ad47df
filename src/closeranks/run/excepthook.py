"""What a script that Python itself started shows of a user's mistake that it does not catch.

One sentence on stderr and exit status 2, as the command line has it; an error that the user's own code raised shows its
traceback above the sentence, from the first line of that code. Invariants: whoever catches ``closeranks.UserError``
catches it as before; all other exceptions go to the hook that was there, so their tracebacks stay as they are.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from closeranks.core.blame import own_frame
from closeranks.core.environment import detect_world
from closeranks.core.errors import CloseranksError, UserError
from closeranks.run.voice import speak, turn_of

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class MistakeHook:
    """A ``sys.excepthook``."""

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            self._before(kind, error, trace)
            return
        print(own_traceback(error), end="", file=sys.stderr, flush=True)
        world = detect_world()
        speak(error, turn_of(error, world, None))
        if not hasattr(sys, "ps1"):  # at a prompt one goes on
            raise SystemExit(error.exit_code)


def install() -> None:
    """May be called again."""
    if not isinstance(sys.excepthook, MistakeHook):
        sys.excepthook = MistakeHook(sys.excepthook)


def settle(before: ExceptHook, num_ranks: int) -> None:
    """After torch has formed a group: its own hook puts ``[rank0]:`` before every line, which tells something only
    where there are several ranks. ``before``: the hook of the time before."""
    if num_ranks == 1:
        sys.excepthook = before
    else:
        install()


def own_traceback(error: UserError) -> str:
    """Of the error in the user's code that this one tells of; empty where there is none."""
    cause = error.__cause__
    if cause is None or isinstance(cause, CloseranksError) or own_frame(cause) is None:
        return ""
    trace = cause.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("closeranks."):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(cause), cause, trace))
