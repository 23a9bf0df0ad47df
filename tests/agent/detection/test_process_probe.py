"""What the kernel says of real processes: hung, stopped, busy, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import closeranks
from closeranks.agent.detection.process_probe import (
    ask_children_for_stacks,
    ask_for_stacks,
    data_read_location,
    is_stack_line,
    kernel_state,
    main_thread_location,
    sample_processes,
)

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
    deadline = time.monotonic() + 120
    while (seen := kernel_state(pid)) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def test_a_stopped_process_is_t_and_does_not_answer() -> None:
    with _process("time.sleep(60)") as process:
        assert _until(process.pid, "S") == "S"
        process.send_signal(signal.SIGSTOP)
        assert _until(process.pid, "T") == "T"
        assert sample_processes({3: process.pid}, 0.05)[3].state == "T"
        pidfd = os.pidfd_open(process.pid)
        started_at = time.monotonic()
        ask_for_stacks([pidfd])
        assert time.monotonic() - started_at < 60.0, "it never answers"
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
        sample = sample_processes({0: process.pid})[0]
        deadline = time.monotonic() + 120  # others may use the processors
        while (sample.load > 0.3) != is_busy and time.monotonic() < deadline:
            sample = sample_processes({0: process.pid})[0]
    assert (sample.load > 0.3) == is_busy
    if not is_busy:
        assert sample.state == "S"
        assert (sample.call if sample.call == "lock" else "other") == call


def test_stacks_come_even_while_the_interpreters_lock_is_held() -> None:
    with _process("ctypes.PyDLL(None).sleep(60)") as process:
        assert _until(process.pid, "S") == "S"
        pidfd = os.pidfd_open(process.pid)
        ask_for_stacks([pidfd])
        os.close(pidfd)
        assert process.stderr is not None
        lines = [process.stderr.readline().rstrip() for _ in range(2)]
    assert main_thread_location(["words", *lines]) == "<string>:1 in <module>"


def test_the_last_stacks_of_a_log_count_and_a_log_without_any_says_nothing() -> None:
    old = ["Current thread 0x7f (most recent call first):", '  File "/a/old.py", line 3 in wait']
    new = [
        "Current thread 0x7f [python] (most recent call first):",
        '  File "/a/model.py", line 57 in forward',
        "  ...",
    ]
    assert main_thread_location([*old, "more words", *new]) == "model.py:57 in forward"
    assert main_thread_location(["a line"]) == ""
    assert main_thread_location(new[:1]) == ""


def test_a_process_that_is_gone_has_no_state_and_is_asked_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    assert kernel_state(process.pid) == ""
    ask_for_stacks([pidfd])
    assert sample_processes({0: process.pid, 1: None}, 0.01)[0].state == ""
    os.close(pidfd)


STACKS = """
Thread 0x1 (most recent call first):
  File "{lib}/threading.py", line 327 in wait
  File "{job}/data.py", line 12 in __getitem__
  File "{ours}/data/reader.py", line 50 in read

Current thread 0x2 (most recent call first):
  File "{lib}/queue.py", line 140 in get
  File "{ours}/data/loading/ahead.py", line 40 in take
  File "{ours}/run/loop.py", line 40 in drive
  File "{job}/train.py", line 3 in <module>
""".format(lib=sysconfig.get_path("stdlib"), job="/home/me", ours=Path(closeranks.__file__).parent).splitlines()


def test_who_reads_a_sample_is_named_by_the_users_line_and_who_waits_for_it_is_not() -> None:
    assert data_read_location(STACKS) == "/home/me/data.py:12 in __getitem__"
    assert data_read_location(STACKS[6:]) == ""
    assert data_read_location(["it printed this", *STACKS[6:], *STACKS]) == "/home/me/data.py:12 in __getitem__"
    assert all(is_stack_line(line) for line in STACKS if line)
    assert not is_stack_line("step 3: File not found")


def test_children_that_listen_are_asked_and_others_left_alone() -> None:
    code = "import faulthandler, signal, subprocess, sys; {} print('up', flush=True); subprocess.run(sys.argv[1:])"
    listens = code.format("faulthandler.register(signal.SIGUSR1, file=1);")
    deaf = [sys.executable, "-c", "import sys; print('deaf', flush=True); sys.stdin.read()"]
    command = [sys.executable, "-c", code.format(""), sys.executable, "-c", listens, *deaf]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["up\n", "up\n", "deaf\n"]
        ask_children_for_stacks(process.pid)
        assert process.stdout.readline().startswith("Current thread")
        process.stdin.close()
        assert process.wait(60) == 0, "nobody died of it"
