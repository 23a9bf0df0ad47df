"""How do Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 reach a loop that never blocks outside its selector?

The interpreter's C handler writes the signal's number into a pipe that the loop watches; the Python handlers do
nothing. Invariants: handlers and wake-up descriptor are put back as they were found; a SIGHUP that is ignored (nohup)
stays ignored. Outside the main thread Python allows neither, and the caller's own handling stays in force.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from closeranks.agent.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The pipe has it already."""


def is_ignored_hangup(number: int) -> bool:
    """``nohup`` has asked that nothing becomes of a lost connection."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def heard_by(loop: Loop, on_signal: Callable[[int], None]) -> Iterator[None]:
    """For the duration, each of these signals becomes one call of ``on_signal`` from within the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def read() -> None:
        for signum in os.read(reader, 64):
            if signum in _HEARD:
                on_signal(signum)

    loop.watch(reader, read)
    last_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    last = {number: signal.signal(number, _nothing) for number in _HEARD if not is_ignored_hangup(number)}
    try:
        yield
    finally:
        for number, handler in last.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(last_fd)
        loop.forget(reader)
        os.close(reader)
        os.close(writer)
