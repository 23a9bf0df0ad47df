"""Ends orphan processes: those that user code started and that outlived the run, such as daemons in another session.

The agent adopts every descendant that loses its parent, so it knows all of them. Invariant: when ``end_orphans``
returns, each orphan was named, asked to end (SIGTERM), and killed if it did not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SETTLE_S = 1.0
"""For processes that end by themselves because their worker has: they are not reported."""
_TERM_S = 3.0
_KILL_S = 5.0
_POLL_S = 0.02
_COMMAND_CHARS = 60


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    pid: int
    parent: int
    session: int
    state: str


def children_of(pid: int) -> set[int]:
    return {process.pid for process in _processes() if process.parent == pid}


def find_orphans(processes: Iterable[ProcessEntry], me: int, my_session: int, known: Collection[int]) -> list[int]:
    """Adopted children of ``me`` and all their descendants. What this process starts itself shares its session; what
    comes from a zygote never does."""
    alive = [process for process in processes if process.state not in "ZX"]
    found = [one.pid for one in alive if one.parent == me and one.session != my_session and one.pid not in known]
    for parent in found:  # grows while it is walked
        found += [one.pid for one in alive if one.parent == parent]
    return found


def end_orphans(known: Collection[int], on_note: Callable[[str], None]) -> None:
    """``known``: children that were there before the run."""
    if not _wait_until_gone(known, _SETTLE_S):
        return
    left = _orphans(known)
    listed = ", ".join(f"{pid} ({_command(pid)})" for pid in left)
    on_note(f"Ending processes that the run's code started and left running: {listed}.")
    _signal(left, signal.SIGTERM)
    if _wait_until_gone(known, _TERM_S):
        left = _orphans(known)
        on_note(f"Killing those that did not end: {', '.join(map(str, left))}.")
        _signal(left, signal.SIGKILL)
        _wait_until_gone(known, _KILL_S)


def _orphans(known: Collection[int]) -> list[int]:
    return find_orphans(_processes(), os.getpid(), os.getsid(0), known)


def _wait_until_gone(known: Collection[int], seconds: float) -> bool:
    """Wait for the orphans to end; True if some are left afterwards. Without orphans it costs one scan of /proc."""
    until = time.monotonic() + seconds
    while _orphans(known):
        if time.monotonic() >= until:
            return True
        time.sleep(_POLL_S)
    return False


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> list[ProcessEntry]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                found.append(ProcessEntry(int(entry), int(fields[1]), int(fields[3]), fields[0].decode()))
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words if len(words) <= _COMMAND_CHARS else f"{words[: _COMMAND_CHARS - 3]}..."
