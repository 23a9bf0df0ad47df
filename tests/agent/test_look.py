"""What the kernel says of real processes: hung, stopped, busy, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from closeranks.agent.look import ask_for_stacks, kernel_state, observe, place_of

_SETUP = "import faulthandler, signal, time, ctypes, threading, re; faulthandler.register(signal.SIGUSR1);"


@contextmanager
def _process(code: str) -> Iterator[subprocess.Popen[str]]:
    started = "print('ready', flush=True);"
    command = [sys.executable, "-c", _SETUP + started + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _until(pid: int, state: str) -> str:
    deadline = time.monotonic() + 5
    while (seen := kernel_state(pid)) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def test_a_stopped_process_is_t_and_does_not_answer() -> None:
    with _process("time.sleep(60)") as process:
        assert _until(process.pid, "S") == "S"
        process.send_signal(signal.SIGSTOP)
        assert _until(process.pid, "T") == "T"
        assert observe({3: process.pid}, 0.05)[3].state == "T"
        pidfd = os.pidfd_open(process.pid)
        started_at = time.monotonic()
        ask_for_stacks([pidfd])
        assert time.monotonic() - started_at < 0.5
        os.close(pidfd)


@pytest.mark.parametrize(
    ("code", "call", "is_busy"),
    [
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "lock", False),
        ("time.sleep(60)", "other", False),
        ("ctypes.PyDLL(None).sleep(60)", "other", False),
        ("re.match(r'(a+)+$', 'a' * 60 + 'b')", "", True),
    ],
)
def test_who_sleeps_on_a_lock_is_told_from_who_sleeps_elsewhere_or_works(code: str, call: str, is_busy: bool) -> None:
    with _process(code) as process:
        sight = observe({0: process.pid})[0]
        deadline = time.monotonic() + 5
        while (sight.load > 0.3) != is_busy and time.monotonic() < deadline:
            sight = observe({0: process.pid})[0]
    assert (sight.load > 0.3) == is_busy
    if not is_busy:
        assert sight.state == "S"
        assert (sight.call if sight.call == "lock" else "other") == call


def test_stacks_come_even_while_the_interpreters_lock_is_held() -> None:
    with _process("ctypes.PyDLL(None).sleep(60)") as process:
        assert _until(process.pid, "S") == "S"
        pidfd = os.pidfd_open(process.pid)
        ask_for_stacks([pidfd])
        os.close(pidfd)
        assert process.stderr is not None
        lines = [process.stderr.readline().rstrip() for _ in range(2)]
    assert place_of(["words", *lines]) == "<string>:1 in <module>"


def test_the_last_stacks_of_a_log_count_and_a_log_without_any_says_nothing() -> None:
    old = ["Current thread 0x7f (most recent call first):", '  File "/a/old.py", line 3 in wait']
    new = [
        "Current thread 0x7f [python] (most recent call first):",
        '  File "/a/model.py", line 57 in forward',
        "  ...",
    ]
    assert place_of([*old, "more words", *new]) == "model.py:57 in forward"
    assert place_of(["a line"]) == ""
    assert place_of(new[:1]) == ""


def test_a_process_that_is_gone_has_no_state_and_is_asked_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    assert kernel_state(process.pid) == ""
    ask_for_stacks([pidfd])
    assert observe({0: process.pid, 1: None}, 0.01)[0].state == ""
    os.close(pidfd)
