"""What does the agent wait on? One selector, one thread, and a call for each thing that becomes ready.

Invariant: everything watched is forgotten before it is closed, so that a number the kernel gives out again is never
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


class Loop:
    """A selector whose keys are calls."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: int | HasFileno, call: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def also_writable(self, source: int | HasFileno, wanted: bool) -> None:
        """Wake up as well when there is room to write; the same call is made."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def forget(self, source: int | HasFileno) -> None:
        """Stop watching; a source that is not watched (any more) is no error, as ends come from several sides."""
        if source in self:
            self._selector.unregister(source)

    def __contains__(self, source: object) -> bool:
        try:
            return source in self._selector.get_map()
        except ValueError:  # it was closed meanwhile and has no descriptor any more
            return False

    def turn(self, until: float | None = None) -> None:
        """Wait until something is ready, or until then (``time.monotonic()``), and make the calls."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # An earlier call of this turn may have closed this one's source.
            if key.fileobj in self:
                key.data()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._selector.close()
