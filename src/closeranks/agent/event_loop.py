"""The agent's event loop: one selector, one thread, and a callback for each descriptor that becomes ready.

Invariant: every descriptor is unregistered before it is closed, so that one whose number the kernel reuses is never
mistaken for the old one.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class EventLoop:
    """A selector whose keys hold callbacks."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: int | HasFileno, call: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def watch_writable(self, source: int | HasFileno, wanted: bool) -> None:
        """Also watch for room to write, or stop doing so; the callback is the same as for reading."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def unwatch(self, source: int | HasFileno) -> None:
        """Stop watching. A source that is not watched is no error, because several code paths may end it."""
        if source in self:
            self._selector.unregister(source)

    def __contains__(self, source: object) -> bool:
        try:
            return source in self._selector.get_map()
        except ValueError:  # it was closed meanwhile and has no descriptor any more
            return False

    def run_once(self, until: float | None = None) -> None:
        """Wait until something is ready, or until ``until`` (``time.monotonic()``), and run the callbacks."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # An earlier callback of this iteration may have closed this source.
            if key.fileobj in self:
                key.data()

    def __enter__(self) -> EventLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._selector.close()
