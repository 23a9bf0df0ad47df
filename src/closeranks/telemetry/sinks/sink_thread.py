"""Passes the events of a run to one sink, on a thread of its own, so that no sink slows or stops a step.

The training thread appends to a queue. The sink's thread wakes a few times a second and takes what has gathered.
Invariants: ``handle`` never waits and never raises; the queue is bounded, what does not fit is counted and the user is
told; a sink that fails is told once and tried again, without effect on the others; closing takes a bounded time. Cost:
a fraction of a microsecond an event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from closeranks.core.errors import UserError
from closeranks.core.events import Event, Warned
from closeranks.core.system.background_thread import BackgroundThread
from closeranks.core.tracebacks import describe_error
from closeranks.telemetry.sinks.sink import MissingPackageError, Sink

MOST_EVENTS = 20_000
"""Some minutes of a fast run: a restart of a server loses nothing."""
_BATCH = 1_000
_PERIOD_S = 0.25
"""The thread does not wake for each event: each wake-up may cost the training thread its turn."""
_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 60.0
_log = logging.getLogger(__name__)


class SinkThread:
    """Call sequence: ``handle`` from any thread; ``close`` once, after the last event."""

    def __init__(self, sink: Sink, emit: Callable[[Event], None], *, is_retried: bool = True) -> None:
        """``is_retried``: False for a sink that is not called again after a failure."""
        self._sink, self._emit, self._is_retried = sink, emit, is_retried
        self._queue: deque[Event] = deque()
        self._batch: list[Event] = []
        """Taken from the queue, and not handled yet."""
        self._num_lost = self._num_told_lost = 0
        self._is_open = self._is_disabled = self._is_closed = False
        self._has_told_failure = self._has_told_recovery = self._has_told_drops = False
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._stop = threading.Event()
        self._thread = BackgroundThread(f"sink {sink.name}")
        self._thread.submit(self._run)

    def handle(self, event: Event) -> None:
        if self._is_disabled or self._is_closed:
            return
        if len(self._queue) >= MOST_EVENTS:
            self._num_lost += 1
        else:
            self._queue.append(event)

    def close(self, timeout_s: float = 60.0) -> None:
        """Deliver what is queued and close the sink; gives up after ``timeout_s``."""
        self.begin_close()
        if not self._thread.close(timeout_s):
            num_left = len(self._queue) + len(self._batch)
            self._tell(f"{self._sink.name} did not finish in time: the last {num_left} events may be missing")
        self._emit = _log_event  # the thread may still run, and the run's file is closed next

    def begin_close(self) -> None:
        """The first half of ``close``: several sinks can finish at the same time."""
        self._is_closed = True
        self._stop.set()

    def _run(self) -> None:
        while True:
            is_last = self._stop.wait(0.0 if not self._is_open and not self._retry_at else _PERIOD_S)
            if not self._is_disabled and (is_last or time.monotonic() >= self._retry_at):
                self._try(self._deliver)
            if is_last:
                break
        if self._is_open:
            self._try(self._sink.close)
        self._num_lost += len(self._queue) + len(self._batch)
        if self._num_lost > self._num_told_lost:
            self._tell(f"{self._sink.name}: {self._lost()}")

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._on_failure(error)

    def _deliver(self) -> None:
        if not self._is_open:
            self._sink.open()
            self._is_open = True
        while self._batch or self._queue:
            if not self._batch:
                self._batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._sink.handle(self._batch)
            self._batch = []
            self._on_success()
        if self._num_lost and not (self._has_told_drops or self._has_told_failure):
            self._has_told_drops = True
            self._tell(f"{self._sink.name} is slower than the run: {self._lost()} so far")

    def _on_success(self) -> None:
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        if self._has_told_failure and not self._has_told_recovery:
            self._has_told_recovery = True
            self._tell(f"{self._sink.name} works again; {self._lost()}")

    def _lost(self) -> str:
        self._num_told_lost = self._num_lost
        return f"{self._num_lost} events were lost" if self._num_lost else "nothing was lost"

    def _on_failure(self, error: Exception) -> None:
        _log.info("%s failed", self._sink.name, exc_info=error)
        self._is_open = False
        if not self._is_retried or isinstance(error, MissingPackageError):
            self._is_disabled = True
            self._queue.clear()
            self._batch = []
            self._tell(f"{self._sink.name} is disabled for the rest of the run: {_reason(error, self._sink.fix)}")
            return
        if len(self._queue) >= MOST_EVENTS:  # it may be this batch that the sink cannot take
            self._num_lost += len(self._batch)
            self._batch = []
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        if not self._has_told_failure:
            self._has_told_failure = True
            reason = _reason(error, self._sink.fix)
            self._tell(f"{self._sink.name} fails; training continues, and it is tried again. {reason}")

    def _tell(self, what: str) -> None:
        self._emit(Warned(what))


def _reason(error: Exception, fix: str) -> str:
    """What went wrong, and what to do about it, as sentences."""
    if isinstance(error, UserError) and error.fix:
        return str(error)
    what = str(error) if isinstance(error, UserError) else describe_error(error)
    return f"{what.rstrip('.')}. {fix}" if fix else what


def _log_event(event: Event) -> None:
    if isinstance(event, Warned):
        _log.warning("%s", event.what)


def close_all(threads: Iterable[SinkThread], timeout_s: float) -> None:
    """Close several side by side, within ``timeout_s`` in all."""
    deadline = time.monotonic() + timeout_s
    found = list(threads)
    for one in found:
        one.begin_close()
    for one in found:
        one.close(max(0.0, deadline - time.monotonic()))
