"""Finds out which imports of the job's modules start threads.

Workers are forked from the process that imports, and a fork copies no thread but the calling one. Invariant: every
thread is counted once, for the innermost import statement of the user's own code that it appeared in; imports behave
as usual.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from closeranks.core.system.linux import num_threads
from closeranks.core.tracebacks import is_user_file


class ImportThreads:
    """``started``: how many threads each top-level package has started."""

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()

    @contextmanager
    def counted_for(self, name: str) -> Iterator[None]:
        """Count the threads started in this block for ``name``, except those of nested imports that are counted
        themselves."""
        before = num_threads() - self.started.total()
        try:
            yield
        finally:
            if (new := num_threads() - self.started.total() - before) > 0:
                self.started[name.partition(".")[0]] += new

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count each import statement of the user's own modules separately."""
        original: Callable[..., Any] = builtins.__import__
        is_user_file("")  # its first call imports modules itself; later calls do not

        def counting(name: str, globals: Mapping[str, Any] | None = None, *rest: Any, **more: Any) -> Any:
            file = (globals or {}).get("__file__")
            if not name or not isinstance(file, str) or not is_user_file(file):
                return original(name, globals, *rest, **more)
            with self.counted_for(name):
                return original(name, globals, *rest, **more)

        builtins.__import__ = counting
        try:
            yield
        finally:
            builtins.__import__ = original
