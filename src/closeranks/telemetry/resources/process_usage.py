"""What do this process and its child processes use: processors, memory, disks, and what makes them wait?

Children are data loaders and writers of checkpoints; what the kernel adds to a parent when a child has ended is counted
here while it lives, so that totals only grow. Waiting for a processor or a disk is that of the main thread, which
trains.
"""

from __future__ import annotations

import os
import resource

from closeranks.telemetry.resources.proc_files import TICKS_PER_S, numbers_of, text_of
from closeranks.telemetry.resources.reading import Reading

_KIB = 1024
_CPU_TICKS = slice(11, 15)
"""utime, stime, cutime and cstime in /proc/PID/stat, counted from the state, which follows the name."""
_IO_WAIT_TICKS = 39
_IO = {"read_bytes": "read_bytes", "write_bytes": "write_bytes", "rchar": "read_call_bytes"}


def read_process() -> Reading:
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    children = child_pids()
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in (own, ended))
    cpu_s += sum(_cpu_s(text_of(f"/proc/{pid}/stat")) for pid in children)
    status = numbers_of("/proc/self/status")
    levels = {"rss_bytes": status["VmRSS"] * _KIB} if "VmRSS" in status else {}
    levels |= {"swapped_bytes": status["VmSwap"] * _KIB} if "VmSwap" in status else {}
    totals = {"preemptions": own.ru_nivcsw, "major_faults": own.ru_majflt, **_io(children)}
    return Reading(totals, {"cpus": cpu_s, **_waits()}, levels=levels)


def child_pids() -> list[int]:
    """The children of all threads, and theirs."""
    found = _children("self")
    for pid in found:
        found += _children(pid)
    return found


def _children(pid: int | str) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    texts = (text_of(f"/proc/{pid}/task/{thread}/children") for thread in threads)
    return [int(child) for text in texts for child in text.split()]


def _cpu_s(stat: str) -> float:
    return sum(map(int, stat.rpartition(")")[2].split()[_CPU_TICKS])) / TICKS_PER_S


def _io(children: list[int]) -> dict[str, float]:
    """Bytes from and to disks, and bytes read by calls, of which the page cache had the rest."""
    found = [files for pid in ("self", *children) if (files := numbers_of(f"/proc/{pid}/io"))]
    return {name: sum(files.get(key, 0) for files in found) for key, name in _IO.items()} if found else {}


def _waits() -> dict[str, float]:
    """Shares of the time; of waiting for disks only where the kernel counts it, which is off by default."""
    waits: dict[str, float] = {}
    if scheduled := text_of("/proc/self/schedstat").split():
        waits["run_wait_share"] = int(scheduled[1]) / 1e9
    fields = text_of("/proc/self/stat").rpartition(")")[2].split()
    if text_of("/proc/sys/kernel/task_delayacct").strip() == "1" and len(fields) > _IO_WAIT_TICKS:
        waits["io_wait_share"] = int(fields[_IO_WAIT_TICKS]) / TICKS_PER_S
    return waits
