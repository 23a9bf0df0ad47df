"""Finds out which imports of the job's modules start threads.

Workers are forked from the process that imports, and a fork takes no other thread along. Invariant: every thread is
counted once, for the innermost import statement of the user's own code that it appeared in; imports behave as ever.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from closeranks.core.blame import is_own
from closeranks.core.linux import num_threads


class ImportThreads:
    """``started``: how many threads each top-level package has started."""

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()

    @contextmanager
    def counted_for(self, name: str) -> Iterator[None]:
        """What runs meanwhile is the import of ``name``. Imports inside it that are counted themselves are left out."""
        before = num_threads() - self.started.total()
        try:
            yield
        finally:
            if (new := num_threads() - self.started.total() - before) > 0:
                self.started[name.partition(".")[0]] += new

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Import statements of the user's own modules are counted each by itself."""
        original: Callable[..., Any] = builtins.__import__
        is_own("")  # finds out now, with imports of its own, what it tells from then on without any

        def counting(name: str, globals: Mapping[str, Any] | None = None, *rest: Any, **more: Any) -> Any:
            file = (globals or {}).get("__file__")
            if not name or not isinstance(file, str) or not is_own(file):
                return original(name, globals, *rest, **more)
            with self.counted_for(name):
                return original(name, globals, *rest, **more)

        builtins.__import__ = counting
        try:
            yield
        finally:
            builtins.__import__ = original
