"""Loads steps in a background thread before they are asked for.

Invariant: steps are returned in order, none lost and none invented; an error that ends the thread is raised in place of
the step it was loading.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, Queue

from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.tracebacks import describe_error
from closeranks.data.loading.batch_reader import LoadedBatch
from closeranks.data.loading.worker_pool import LoaderStopped

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0


class PrefetchThread:
    """One background thread that loads the steps ``range(first, last)``."""

    def __init__(self, load: Callable[[int], list[LoadedBatch]], steps: range, depth: int, identity: str) -> None:
        """Up to ``depth`` loaded steps wait in the queue while one more is being loaded."""
        self._load = load
        self._steps = steps
        self._identity = identity
        self._ready: Queue[list[LoadedBatch] | CloseranksError] = Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="closeranks-loader", daemon=True)
        self._thread.start()

    def take(self) -> list[LoadedBatch]:
        """The next step; waits until it is loaded."""
        outcome = self._ready.get()
        if isinstance(outcome, CloseranksError):
            raise outcome
        return outcome

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Join the thread; one that is stuck in a read is abandoned with a warning."""
        self._stopped.set()
        self._drain()  # a thread that waits for space in the queue puts its last step and then sees the flag
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self.is_alive:
            text = "reading of %s did not stop within %g s; its thread is left running"
            _LOG.warning(text, self._identity, _CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        step = self._steps.start
        try:
            for step in self._steps:
                if self._stopped.is_set():
                    return
                self._ready.put(self._load(step))
        except LoaderStopped:
            return
        except CloseranksError as error:
            self._ready.put(error)
        except BaseException as error:  # any error must reach the loop, which would otherwise wait forever
            failure = DataError(f"reading step {step + 1} of {self._identity} raised {describe_error(error)}")
            failure.__cause__ = error
            self._ready.put(failure)

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except Empty:
            return
