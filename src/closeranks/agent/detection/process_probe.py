"""Probes a process that shows no progress, through /proc and signals.

Signals go through pidfds. Invariant: every call returns within a fixed time, also for a process that is stopped, stuck
or gone: nothing here waits for the process itself.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from closeranks.agent.detection.hang import ProcessSample
from closeranks.core.tracebacks import display_path, is_package_file, is_user_file

SAMPLE_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_SAMPLES = 5
_LOCK_CALLS = ("futex", "202", "98", "449")
"""Sleeping on a lock, by the name of the kernel's function or by the number of the system call (x86, ARM,
futex_waitv)."""
_STATE_WORDS = {"S": "sleeps", "D": "is stuck in the kernel", "T": "is stopped", "Z": "has died", "": "is gone"}
_HEADS = ("Current thread 0x", "Thread 0x")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')


def kernel_state(pid: int) -> str:
    """One letter: R runs, S sleeps, D sleeps uninterruptibly, T is stopped, t is traced, Z is a zombie. Empty when
    there is no such process. T also for a process in a frozen cgroup (a paused container), which the kernel calls
    asleep. About 20 us, 60 us for one that sleeps."""
    state = _stat(pid)[0]
    return "T" if state == "S" and _is_frozen(pid) else state


def sample_processes(pids: Mapping[int, int | None], seconds: float = SAMPLE_S) -> dict[int, ProcessSample]:
    """Sample what processes, by rank, are doing; takes ``seconds`` in all."""
    known = {rank: pid for rank, pid in pids.items() if pid is not None}
    begun = {rank: _stat(pid)[1] for rank, pid in known.items()}
    seen: dict[int, list[tuple[str, str]]] = {rank: [] for rank in known}
    started_at = time.monotonic()
    for _ in range(_NUM_SAMPLES):
        time.sleep(seconds / _NUM_SAMPLES)
        for rank, pid in known.items():
            seen[rank].append((kernel_state(pid), _call(pid)))
    lasted_s = time.monotonic() - started_at
    samples = {}
    for rank, pid in known.items():
        state, call = max(seen[rank], key=seen[rank].count)
        load = (_stat(pid)[1] - begun[rank]) / lasted_s
        samples[rank] = ProcessSample(state, call, load)
    return samples


def ask_for_stacks(pidfds: Iterable[int]) -> None:
    """Make workers print the stacks of all their threads into their logs, also while a thread holds the GIL
    (``workers.forked_worker`` registers the signal); a stopped worker does not. The output takes a moment to arrive."""
    for pidfd in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)


def ask_children_for_stacks(pid: int) -> None:
    """The same for processes that a worker has started and that catch the signal, as those of its data loader do.
    Others would die of it, and are not signalled."""
    for child in _descendants(pid):
        with suppress(OSError):
            pidfd = os.pidfd_open(child)
            try:
                if _catches(child, signal.SIGUSR1):
                    signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
            finally:
                os.close(pidfd)


def is_stack_line(line: str) -> bool:
    return line.startswith(_HEADS) or _FRAME.match(line) is not None


def data_read_location(lines: Sequence[str]) -> str:
    """Where in the user's code a sample is being read, from the stacks in a log: ``data.py:12 in __getitem__``. Empty
    if no thread is in such code; a thread that only waits for another has no user frame above our own."""
    is_above = False
    for line in lines:
        found = _FRAME.match(line)
        if found is None:
            is_above = line.startswith(_HEADS)
        elif is_above and is_package_file(found["file"]):
            is_above = False
        elif is_above and is_user_file(found["file"]):
            return f"{display_path(found['file'])}:{found['line']} in {found['name']}"
    return ""


def main_thread_user_location(lines: Sequence[str]) -> str:
    """Where the main thread is in the user's code; empty if it is in none, or if there are no stacks."""
    heads = [index for index, line in enumerate(lines) if line.startswith(_HEADS)]
    for line in lines[heads[-1] + 1 :] if heads else []:
        found = _FRAME.match(line)
        if found is None:
            break
        if is_user_file(found["file"]):
            return f"{display_path(found['file'])}:{found['line']} in {found['name']}"
    return ""


def describe_children(pid: int) -> tuple[str, ...]:
    """What each process does that a worker has started: ``process 4242 sleeps on a lock``."""
    return tuple(map(_describe_state, _descendants(pid)))


def _describe_state(pid: int) -> str:
    state = kernel_state(pid)
    on_lock = " on a lock" if state == "S" and _call(pid) == "lock" else ""
    return f"process {pid} {_STATE_WORDS.get(state, 'runs')}{on_lock}"


def main_thread_location(lines: Sequence[str]) -> str:
    """Where a main thread is, from the last stacks in its log: ``model.py:57 in forward``; empty when there are none.

    The signal is handled by the main thread, which therefore is the current thread of the dump.
    """
    heads = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    frames = [_FRAME.match(line) for line in lines[heads[-1] + 1 : heads[-1] + 2]] if heads else []
    if not frames or frames[0] is None:
        return ""
    found = frames[0]
    return f"{Path(found['file']).name}:{found['line']} in {found['name']}"


def _descendants(pid: int) -> list[int]:
    """All descendants, children first."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found[1:]


def _catches(pid: int, signum: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (signum - 1) & 1)


def _stat(pid: int) -> tuple[str, float]:
    """State of the main thread, and CPU seconds of all threads. The process name before them may hold any character."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0.0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _is_frozen(pid: int) -> bool:
    """Whether its cgroup, or one above it, is frozen; False without cgroups of version 2."""
    try:
        own = Path(f"/proc/{pid}/cgroup").read_text().partition("0::")[2].strip()
        return "frozen 1" in Path(f"{_cgroup_mount()}{own}/cgroup.events").read_text()
    except OSError:
        return False


@cache
def _cgroup_mount() -> str:
    """Where cgroups of version 2 are mounted: on some systems beside those of version 1."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((place for _, place, kind, *_ in mounts if kind == "cgroup2"), "/sys/fs/cgroup")


def _call(pid: int) -> str:
    """The system call that the main thread sleeps in; empty if the kernel does not say (other users' processes, no
    ptrace)."""
    try:
        call = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return ""
    return "lock" if call in _LOCK_CALLS else call
