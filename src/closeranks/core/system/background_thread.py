"""Runs jobs that training must not wait for in one background thread, one after the other.

[Note: one thread for life]
The kernel treats the thread that started a process as its parent: a writer that dies with its parent dies with that
thread. So the thread that starts writers lives as long as its owner, however few jobs there are. Invariants: jobs run
in the order of submission; a job that raises is logged and the next one runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

Task = Callable[[], object]
_log = logging.getLogger(__name__)


class BackgroundThread:
    """Call sequence: ``submit`` from any thread; ``close`` after the last task."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # A daemon: a process that exits in the middle of a task must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = self._is_closed = False
        self._starting = threading.Lock()

    def submit(self, task: Task) -> None:
        """Returns at once; the thread starts with the first task. ``RuntimeError`` if the task would never run: no
        thread can be started, or it has ended."""
        with self._starting:
            if self._is_closed:
                raise RuntimeError(f"the background {self._thread.name} is closed")
            if not self._is_started:
                self._thread.start()
                self._is_started = True
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all jobs submitted so far are done."""
        is_done = threading.Event()
        self.submit(is_done.set)
        is_done.wait()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs submitted so far are done, or for ``timeout_s``; returns whether they are done."""
        self._is_closed = True
        if self._is_started:
            self._tasks.put(None)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                _log.exception("a job in the background %s failed", self._thread.name)
            del task  # it may hold tensors
