"""Describes the exit status of a process in words.

A status is the exit code, or the negative number of the signal that ended the process, as in ``subprocess``.
"""

from __future__ import annotations

import os
import signal

_WHY = {
    signal.SIGKILL: "killed by SIGKILL; if nobody sent it, the kernel's out-of-memory killer did: see dmesg",
    signal.SIGSEGV: "killed by SIGSEGV: a crash in native code",
    signal.SIGBUS: "killed by SIGBUS: often /dev/shm is full, or a mapped file was truncated",
    signal.SIGABRT: "killed by SIGABRT: native code called abort()",
    signal.SIGFPE: "killed by SIGFPE: an integer division by zero in native code",
    signal.SIGILL: "killed by SIGILL: a library was built for another processor",
    signal.SIGXCPU: "killed by SIGXCPU: the limit on processor time (ulimit -t) was reached",
    signal.SIGXFSZ: "killed by SIGXFSZ: the limit on file size (ulimit -f) was reached",
}


def status_from_waitid(result: os.waitid_result) -> int:
    """The status in a result of ``waitid``."""
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def describe_status(status: int | None, num_oom_kills: int = 0) -> str:
    """How a process ended. ``num_oom_kills``: how many processes of this host the out-of-memory killer ended
    meanwhile."""
    if status is None:
        return "died; its exit status is not known"
    if status >= 0:
        return f"exited with code {status} without reporting an error"
    if status == -signal.SIGKILL and num_oom_kills:
        return "killed by SIGKILL, probably by the kernel's out-of-memory killer: it killed a process on this host"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"killed by signal {-status}"
    return _WHY.get(number, f"killed by {number.name}")


def num_oom_kills() -> int:
    """How many processes the out-of-memory killer has ended since this host started; 0 if the kernel does not say."""
    try:
        with open("/proc/vmstat") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
