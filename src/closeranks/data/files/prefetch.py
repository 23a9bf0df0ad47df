"""Fetches files in the background before they are needed.

Only the names of the latest request count. They are fetched in order by a few threads that live only while there is
something to fetch. Invariants: a prefetch never fails and never blocks: any error is left to ``local_path``, which runs
into it again and raises it; a thread that finds no space waits for it, and does not skip to files that are needed
later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from closeranks.data.files.cache import PrefetchOutcome

_LOG = logging.getLogger(__name__)
NUM_THREADS = 2
"""Each thread has several requests in flight for a large file; two bridge the pauses between small ones."""
_LOOK_S = 0.5


class FilePrefetcher:
    def __init__(self, fetch: Callable[[str, threading.Event], PrefetchOutcome]) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._wanted: tuple[str, ...] = ()
        self._settled: set[str] = set()
        """The requested files for which nothing is left to do here."""
        self._busy: set[str] = set()
        self._num_threads = 0
        self._num_changes = 0
        """Counts changes, so that one that happens while a thread finds no space is not missed by its wait."""
        self._stop = threading.Event()

    @property
    def pending(self) -> tuple[str, ...]:
        return self._wanted

    def prefetch(self, names: Sequence[str]) -> None:
        """Files that are still requested and were settled are not checked again: this is called for every batch."""
        with self._changed:
            if self._stop.is_set():  # closed before: threads that were told to stop keep the old event
                self._stop = threading.Event()
            self._wanted = tuple(dict.fromkeys(names))
            self._settled &= set(self._wanted)
            num_open = len(self._wanted) - len(self._settled) - len(self._busy & set(self._wanted))
            for _ in range(min(num_open, NUM_THREADS - self._num_threads)):
                self._num_threads += 1
                threading.Thread(target=self._work, name="fetch ahead", daemon=True).start()
            self._wake()

    def space_changed(self) -> None:
        """A file was released."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """Running fetches give up soon; does not wait for them."""
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
            except Exception as error:  # ``local_path`` runs into it again, in a thread that can raise it
                _LOG.info("%s was not prefetched: %s", name, error)
                outcome = PrefetchOutcome.FAILED
            with self._changed:
                self._busy.discard(name)
                if outcome is not PrefetchOutcome.NO_SPACE:
                    self._settled.add(name)
                else:
                    # Other processes release files, too, without notice.
                    self._changed.wait_for(partial(self._has_changed, before), _LOOK_S)

    def _next(self) -> str | None:
        """The first file that no thread works on; a thread for which there is none ends."""
        with self._changed:
            for name in self._wanted:
                if name not in self._settled and name not in self._busy:
                    self._busy.add(name)
                    return name
            self._num_threads -= 1
            return None
