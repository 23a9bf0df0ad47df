"""Linux kernel services for a process: its link to its parent, its name, huge pages, threads and CPU time.

Invariant: from ``die_with_parent`` on, the kernel kills this process when its parent ends, however the parent ends. A
parent that ended before the call is detected as well.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 2 << 20
# Loaded once in the zygote: a forked child must not open libraries before it is tied to its parent.
_LIBC = ctypes.CDLL(None, use_errno=True)

ORPHANED = 111
"""Exit status of a process whose parent died before ``die_with_parent``; nobody is left to read it."""


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent ends. ``parent`` is the expected parent: checked after, to close the race."""
    argument = ctypes.c_ulong(signal.SIGKILL)
    if _LIBC.prctl(_PR_SET_PDEATHSIG, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os._exit(ORPHANED)


def set_process_name(name: str) -> None:
    """What ``top`` shows for this process: the first 15 bytes."""
    nothing = ctypes.c_ulong(0)
    _LIBC.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), nothing, nothing, nothing)


def set_child_subreaper(wanted: bool) -> bool:
    """Whether orphaned descendants become children of this process instead of init's; returns the previous setting."""
    before, nothing = ctypes.c_int(0), ctypes.c_ulong(0)
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), nothing, nothing, nothing)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted), nothing, nothing, nothing)
    return bool(before.value)


def reap_orphans(known: Collection[int]) -> None:
    """Reap adopted children that have ended, except the ``known`` ones, which somebody else waits for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        os.waitpid(found.si_pid, 0)


def use_huge_pages() -> int:
    """Move this process's heap to huge pages, which makes forks and their exit cheaper; returns the bytes moved.

    A fork copies one page-table entry for each page, and its exit frees them: for a process that has imported torch
    (250 MB) that was two thirds of the cost of a fork that does nothing. A kernel before 6.1, or one without huge
    pages, moves nothing.
    """
    with open("/proc/self/maps") as maps:
        # Private, writable and anonymous: the heap, and memory that allocators mapped.
        found = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0(?: +\[heap\])? *$", maps.read())
    moved = 0
    for first, last in ((int(first, 16), int(last, 16)) for first, last in found):
        for start in range(
            -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, last - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES
        ):
            place, size = ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE_BYTES)
            moved += _HUGE_PAGE_BYTES if _LIBC.madvise(place, size, _MADV_COLLAPSE) == 0 else 0
    return moved


def num_threads() -> int:
    """Threads of this process as the kernel counts them, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


class ThreadClock:
    """Seconds for which a thread ran or was runnable; it stops while the thread sleeps, on a lock or a socket.

    For the thread that creates it: the kernel's figures (schedstat) are the time on a processor and the time in the run
    queue. Measured with a quota of a third of a processor: work of 1.1 s then runs 1.1 s and waits 1.8-2.1 s; four
    processes on two processors run 1.0 s and wait 1.0 s or more each, all alike. A reading costs 2 us. A kernel without
    these figures gives the time on a processor alone, which does not show a quota.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def __call__(self) -> float:
        if self._file is None:
            return time.thread_time()
        figures = os.pread(self._file, 96, 0).split()
        return (int(figures[0]) + int(figures[1])) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def boot_id() -> str:
    """Identifies this boot of this machine, whose clock all its containers share; empty where it is hidden."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
