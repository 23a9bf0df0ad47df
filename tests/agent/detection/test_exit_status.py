"""Exit statuses in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from closeranks.agent.detection.exit_status import describe_status, num_oom_kills, status_from_waitid


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exited with code 3"),
        (None, "not known"),
        (-signal.SIGKILL, "if nobody sent it, the kernel's out-of-memory killer did: see dmesg"),
        (-signal.SIGBUS, "/dev/shm"),
        (-signal.SIGUSR2, "killed by SIGUSR2"),
        (-63, "killed by signal 63"),
    ],
)
def test_words(status: int | None, words: str) -> None:
    assert words in describe_status(status)


def test_the_kernels_count_is_used_for_sigkill_alone() -> None:
    assert "probably" in describe_status(-signal.SIGKILL, 2)
    assert describe_status(-signal.SIGSEGV, 2) == describe_status(-signal.SIGSEGV)
    assert num_oom_kills() >= 0


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_a_status_reads_as_subprocess_has_it(code: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    assert status_from_waitid(result) == process.wait() == status
