"""Delivers Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 to the event loop, which blocks only in its selector.

The interpreter's C handler writes the signal's number into a pipe that the event loop watches; the Python handlers do
nothing. Invariants: handlers and wake-up descriptor are restored afterwards; a SIGHUP that is ignored (nohup) stays
ignored. Outside the main thread Python allows neither, and the caller's own handlers stay in force.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from closeranks.agent.event_loop import EventLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """The signal's number is in the pipe already."""


def is_sighup_ignored(number: int) -> bool:
    """Whether this is SIGHUP and it is ignored, as under ``nohup``."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def deliver_signals(loop: EventLoop, on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside this context, each of these signals becomes one call of ``on_signal`` from the event loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def read() -> None:
        for signum in os.read(reader, 64):
            if signum in _SIGNALS:
                on_signal(signum)

    loop.watch(reader, read)
    last_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    last = {number: signal.signal(number, _ignore) for number in _SIGNALS if not is_sighup_ignored(number)}
    try:
        yield
    finally:
        for number, handler in last.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(last_fd)
        loop.unwatch(reader)
        os.close(reader)
        os.close(writer)
