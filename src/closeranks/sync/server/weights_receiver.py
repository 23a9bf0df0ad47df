"""Receives the versions of the weights that servers send, on a worker, while it computes.

A thread receives one version after the other into one of two buffers; ``take`` copies the newest complete one. It asks
for no more versions than will be sent before the next synchronization, so none is awaited for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from closeranks.sync.server.messages import Messages

Receive = Callable[[Sequence[Tensor]], Messages]


class WeightsReceiver:
    """Call sequence, on the main thread: ``expect`` at the beginning of each interval between synchronizations, then
    ``take`` after each step. ``weights``: the flat buckets; ``receive(tensors)`` asks for the next version of them."""

    def __init__(self, weights: Sequence[Tensor], receive: Receive) -> None:
        self._weights, self._receive = weights, receive
        self._filling = [torch.empty_like(one) for one in weights]
        self._ready = [torch.empty_like(one) for one in weights]
        self._expected: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._changed = threading.Condition()
        self._version = 0
        """The one in ``_ready``."""
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.taken = 0
        """The version that the worker computes with."""

    def expect(self, version: int, last: int) -> None:
        """The worker holds ``version``; the next ones, up to ``last``, will be sent."""
        self.taken = self._version = version
        self._expected.put((version, last))
        if self._thread is None:
            # A daemon: a process whose servers are gone must be able to exit.
            self._thread = threading.Thread(target=self._run, name="weights receiver", daemon=True)
            self._thread.start()

    def take(self, at_least: int) -> None:
        """Wait for version ``at_least``, and copy the newest that is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= at_least or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            if self._version > self.taken:
                for own, new in zip(self._weights, self._ready, strict=True):
                    own.copy_(new)
                self.taken = self._version

    def _run(self) -> None:
        try:
            while True:
                first, last = self._expected.get()
                for version in range(first + 1, last + 1):
                    self._receive(self._filling).wait()
                    with self._changed:
                        self._filling, self._ready, self._version = self._ready, self._filling, version
                        self._changed.notify()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify()
