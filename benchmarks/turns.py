"""How can a loop that is not ours take its steps a few at a time?

In a thread of its own, handed back and forth. Invariant: one of the two threads always waits for the other, so that the
loop has the interpreter to itself in its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turns:
    """Call sequence: ``start(body)`` once, which returns when the body first calls ``at_boundary``; then ``take`` for
    each turn, and ``close``. The body calls ``at_boundary`` when its set-up is done and after each step."""

    def __init__(self) -> None:
        self._num_allowed = 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self._wait()

    def take(self, num_steps: int) -> None:
        self._num_allowed = num_steps
        self._go.release()
        self._wait()

    def close(self) -> None:
        """Let the body run to its end: from now on ``at_boundary`` tells it to stop."""
        self._is_closing = True
        self._go.release()
        self._wait()

    def at_boundary(self) -> bool:
        """Waits while no step is allowed; False when the loop should end."""
        if self._num_allowed == 0 and not self._is_closing:
            self._done.release()
            self._go.acquire()
        self._num_allowed -= 1
        return not self._is_closing

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # whatever ends the loop must reach the thread that waits for it
            self._failure = error
        self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure is not None:
            raise self._failure
