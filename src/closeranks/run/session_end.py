"""Records how and why a session ends: finished, drained, stopped by the training code, regrouped, or failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from closeranks.core.errors import CloseranksError
from closeranks.core.events import Event, RunEnded, Warned
from closeranks.core.requests import DRAIN, REGROUP, STOP, RunRequest

REGROUPED = "regrouped"
"""The reason of a generation that ended by agreement, for another to continue."""


FINISHED, _FAILED = "finished", "failed"


class SessionEnd:
    """False while the session is running."""

    def __init__(self) -> None:
        self.reason = self.detail = self._stop_reason = ""
        self._opened_at = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def is_regrouped(self) -> bool:
        return self.reason == REGROUPED

    def request_stop(self, reason: str) -> None:
        """The training code asks for an early end."""
        self._stop_reason = self._stop_reason or reason

    def requests(self) -> frozenset[RunRequest]:
        return frozenset({STOP} if self._stop_reason else ())

    def apply_requests(self, requests: frozenset[RunRequest]) -> None:
        """Act on the requests that all ranks have agreed on. A session that ends saves a checkpoint; one that regroups
        keeps its state in memory."""
        if requests & {DRAIN, STOP}:
            self.reason, self.detail = "drained" if DRAIN in requests else "stopped", self._stop_reason
        elif REGROUP in requests:
            self.reason = self.reason or REGROUPED

    def mark_loop_exit(self) -> None:
        """The user's loop was left early."""
        self.reason, self.detail = self.reason or "stopped", self.detail or "the training loop exited early"

    def mark_failed(self, error: BaseException) -> None:
        self.reason, self.detail = _FAILED, str(error)

    @contextmanager
    def keep_first_error(self, emit: Callable[[Event], None]) -> Iterator[None]:
        """Wraps the last actions of a session: the error that ended the run stays the reported cause."""
        try:
            yield
        except CloseranksError as error:
            if self.reason != _FAILED:
                self.mark_failed(error)
                raise
            emit(Warned(str(error)))

    def ended_event(self, num_done: int) -> RunEnded:
        return RunEnded(num_done, self.reason or FINISHED, time.monotonic() - self._opened_at, self.detail)
