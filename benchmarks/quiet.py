"""Did something else run on this machine while a measurement lasted?

A thread looks four times a second for processes that run and do not descend from this one. Invariant: what is measured
decides nothing: a measurement counts or is repeated by what others did alone.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

PERIOD_S = 0.25


class Watch:
    """``with Watch() as watch: ...; watch.share`` is the share of looks at which another process was running."""

    def __init__(self) -> None:
        self._looks = self._others = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def share(self) -> float:
        return self._others / max(1, self._looks)

    def _look_again(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._looks += 1
            self._others += bool(others_running())


def others_running() -> set[int]:
    """Processes that are on a processor, or wait for one, and are neither this one nor its descendants."""
    parents, running = {}, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (found := _stat(entry)) is not None:
            pid, (state, parents[pid]) = int(entry.name), found
            if state == "R":
                running.add(pid)
    return {pid for pid in running if not _descends(pid, parents)}


def _stat(process: Path) -> tuple[str, int] | None:
    """State and parent; None for a process that has ended."""
    try:
        words = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], int(words[1])


def _descends(pid: int, parents: dict[int, int]) -> bool:
    """The kernel's own threads, which descend from process 2, count as nobody's."""
    own = {os.getpid(), 2}
    while pid not in own and pid in parents:
        pid = parents[pid]
    return pid in own
