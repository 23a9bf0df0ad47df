"""A ``sys.excepthook`` that prints an uncaught ``UserError`` in a script that Python itself runs, not our command line.

It prints one sentence on stderr and exits with status 2, as the command line does; if the user's own code raised the
error, its traceback is printed above the sentence, from the first line of that code. Invariants: code that catches
``closeranks.UserError`` still does; all other exceptions go to the previous hook, so their tracebacks do not change.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from closeranks.core.errors import CloseranksError, UserError
from closeranks.core.system.environment import detect_world
from closeranks.core.tracebacks import user_frame
from closeranks.run.worker.error_output import print_error, report_turn

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class UserErrorHook:
    """A ``sys.excepthook``."""

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            self._before(kind, error, trace)
            return
        print(user_traceback(error), end="", file=sys.stderr, flush=True)
        world = detect_world()
        print_error(error, report_turn(error, world, None))
        if not hasattr(sys, "ps1"):  # an interactive prompt continues
            raise SystemExit(error.exit_code)


def install() -> None:
    """Idempotent."""
    if not isinstance(sys.excepthook, UserErrorHook):
        sys.excepthook = UserErrorHook(sys.excepthook)


def replace_torch_hook(before: ExceptHook, num_ranks: int) -> None:
    """Called after torch has formed a group: torch's hook puts ``[rank0]:`` before every line, which is useful only
    with several ranks. ``before``: the hook that was installed before."""
    if num_ranks == 1:
        sys.excepthook = before
    else:
        install()


def user_traceback(error: UserError) -> str:
    """The traceback of the error in the user's code that caused this one; empty if there is none."""
    cause = error.__cause__
    if cause is None or isinstance(cause, CloseranksError) or user_frame(cause) is None:
        return ""
    trace = cause.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("closeranks."):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(cause), cause, trace))
