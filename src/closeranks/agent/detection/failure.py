"""The report about an exception that a worker sends to its agent.

Invariant: the report consists of plain values taken while the exception is being handled; it says where in the user's
own code the exception came from, and whether it looks like a consequence of another rank's death rather than a cause.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from closeranks.core.errors import CloseranksError, UserError, encode
from closeranks.core.printable import printable
from closeranks.core.tracebacks import display_path, printable_message, user_frame

_MAX_TRACEBACK_CHARS = 20_000

NO_STORE = "rank 0 has not opened its store"

# Messages of gloo, NCCL and the store when the other end is gone or silent.
_CONSEQUENCE = re.compile(
    r"connection (was )?(reset|closed|aborted|refused)|broken pipe|closed by peer|socket (timeout|closed)"
    r"|gloo.*(timeout|timed out)|timed out (after|waiting)|wait timeout|connectfullmesh|pair closure"
    r"|nccl.*(timeout|remote|abort|unhandled|internal error)|remote process exited|watchdog caught"
    r"|(failed to recv|recvvalue failed|sendbytes failed|store.*timeout)|" + NO_STORE,
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """An exception as plain values."""

    kind: str
    message: str
    place: str
    """``file:line in function`` of the user's own code, or of the innermost frame if none is the user's."""
    traceback: str
    at: float
    """``time.monotonic()`` when it was caught: the same clock for all processes of a host."""
    step: int | None = None
    is_consequence: bool = False
    error: dict[str, Any] | None = None
    """``core.errors.encode`` of a ``CloseranksError``; None for any other exception."""

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def failure_report(error: BaseException, step: int | None) -> FailureReport:
    """Everything that the agent needs to know about an exception."""
    text = "".join(traceback.format_exception(error))
    return FailureReport(
        kind=type(error).__name__,
        message=plain_message(error),
        place=user_location(error),
        traceback=printable(text[-_MAX_TRACEBACK_CHARS:]),
        at=time.monotonic(),
        step=step,
        is_consequence=is_consequence(error),
        error=encode(error) if isinstance(error, CloseranksError) else None,
    )


def plain_message(error: BaseException) -> str:
    """The message without the C++ frames that torch appends to it, or the location that a syntax error repeats."""
    text = printable(error.msg) if isinstance(error, SyntaxError) else printable_message(error)
    return text.split("\nException raised from", 1)[0].strip()


def is_consequence(error: BaseException) -> bool:
    """Whether this looks like the loss of another rank. A ``UserError`` never does, whatever it was raised from."""
    if isinstance(error, UserError):
        return False
    return any(
        isinstance(link, ConnectionError) or _CONSEQUENCE.search(printable_message(link)) for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def user_location(error: BaseException) -> str:
    """The location in the user's own code; of the innermost frame if none is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{display_path(error.filename)}:{error.lineno}"
    frame = user_frame(error) or next(reversed(traceback.extract_tb(error.__traceback__)), None)
    return f"{display_path(frame.filename)}:{frame.lineno} in {frame.name}" if frame else ""
