"""Signals become calls from within the loop."""

from __future__ import annotations

import os
import signal
import threading
import time

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.host.signals import deliver_signals


def test_signals_are_heard_in_the_loop_and_handlers_are_put_back() -> None:
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with EventLoop() as loop:
        with deliver_signals(loop, heard.append):
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == [], "nothing happens outside the loop"
            loop.run_once(time.monotonic() + 5.0)
            os.kill(os.getpid(), signal.SIGTERM)
            loop.run_once(time.monotonic() + 5.0)
        assert signal.getsignal(signal.SIGINT) is before
    assert heard == [signal.SIGINT, signal.SIGTERM]


def test_a_hangup_is_heard_unless_it_is_ignored() -> None:
    heard: list[int] = []
    for handling, expected in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
        before = signal.signal(signal.SIGHUP, handling)
        try:
            with EventLoop() as loop, deliver_signals(loop, heard.append):
                os.kill(os.getpid(), signal.SIGHUP)
                loop.run_once(time.monotonic() + (5.0 if expected else 0.0))
            assert signal.getsignal(signal.SIGHUP) is handling
        finally:
            signal.signal(signal.SIGHUP, before)
        assert heard == expected
        heard.clear()


def test_outside_the_main_thread_the_callers_handling_stays() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with EventLoop() as loop, deliver_signals(loop, lambda number: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
