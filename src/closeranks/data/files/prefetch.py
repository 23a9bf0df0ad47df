"""Which file is fetched before it is needed?

Those that were wanted last, in their order, by a few threads that live only while there is something to fetch.
Invariants: a wish never fails and never blocks: what goes wrong is left to ``hold``, which meets it again and says so;
a thread that finds no room waits for it, and does not go on to what is needed later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from closeranks.data.files.cache import PrefetchOutcome

_LOG = logging.getLogger(__name__)
NUM_THREADS = 2
"""Each has several requests on their way for a large file; two bridge the pauses between small ones."""
_LOOK_S = 0.5


class FilePrefetcher:
    def __init__(self, fetch: Callable[[str, threading.Event], PrefetchOutcome]) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._wanted: tuple[str, ...] = ()
        self._settled: set[str] = set()
        """Of those wanted: nothing is left to do for them here."""
        self._busy: set[str] = set()
        self._num_threads = 0
        self._num_changes = 0
        """What happens while a thread finds no room must not be missed by its wait."""
        self._stop = threading.Event()

    @property
    def pending(self) -> tuple[str, ...]:
        return self._wanted

    def prefetch(self, names: Sequence[str]) -> None:
        """What stays wanted and was settled is not looked at again: this is called at every batch."""
        with self._changed:
            if self._stop.is_set():  # closed before: those who gave up keep their word to stop
                self._stop = threading.Event()
            self._wanted = tuple(dict.fromkeys(names))
            self._settled &= set(self._wanted)
            num_open = len(self._wanted) - len(self._settled) - len(self._busy & set(self._wanted))
            for _ in range(min(num_open, NUM_THREADS - self._num_threads)):
                self._num_threads += 1
                threading.Thread(target=self._work, name="fetch ahead", daemon=True).start()
            self._wake()

    def space_changed(self) -> None:
        """Something was let go."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """Whoever is fetching gives up soon; nobody is waited for."""
        with self._changed:
            self._stop.set()
            self._wanted = ()
            self._wake()

    def _wake(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    def _has_changed(self, before: int) -> bool:
        return self._num_changes != before

    def _work(self) -> None:
        while (name := self._next()) is not None:
            before = self._num_changes
            try:
                outcome = self._fetch(name, self._stop)
            except Exception as error:  # whatever it is, ``hold`` meets it again, in a thread that can raise it
                _LOG.info("%s was not prefetched: %s", name, error)
                outcome = PrefetchOutcome.FAILED
            with self._changed:
                self._busy.discard(name)
                if outcome is not PrefetchOutcome.NO_ROOM:
                    self._settled.add(name)
                else:
                    # Other processes let go, too, and tell nobody.
                    self._changed.wait_for(partial(self._has_changed, before), _LOOK_S)

    def _next(self) -> str | None:
        """The first that nobody is at; a thread for which there is none ends."""
        with self._changed:
            for name in self._wanted:
                if name not in self._settled and name not in self._busy:
                    self._busy.add(name)
                    return name
            self._num_threads -= 1
            return None
