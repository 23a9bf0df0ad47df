"""Decides how often and how soon a request to a store is retried.

This is the only layer of retries: those of the client library are switched off where possible, since eight tries of
ours would otherwise be two hundred of its own. Invariant: a refusal is never retried, and the total time spent waiting
is bounded.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from closeranks.storage.errors import is_transient, store_error
from closeranks.storage.protocol import StorageError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: delays double from ``first_s`` to ``longest_s``, each shortened by up to half at random. The
    ranks of a run are throttled at the same moment, and must not all retry together."""

    num_tries: int = 8
    first_s: float = 0.25
    longest_s: float = 10.0

    def delays(self, uniform: Callable[[], float] = random.random) -> Iterator[float]:
        """One delay fewer than there are tries; ``uniform`` returns numbers from 0 up to 1."""
        for number in range(self.num_tries - 1):
            yield min(self.longest_s, self.first_s * 2**number) * (1 - uniform() / 2)


@dataclass(slots=True)
class RetryCount:
    """How often a request was started: a response may be lost although the store carried out the request."""

    count: int = 0


def retry(
    act: Callable[[], T],
    doing: str,
    url: str,
    policy: RetryPolicy,
    tries: RetryCount | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Call ``act`` until it succeeds; ``StorageError`` once it is refused or the tries are used up. A ``StorageError``
    raised by ``act`` itself is already classified and is passed on."""
    tries = tries if tries is not None else RetryCount()
    pauses = policy.delays()
    while True:
        tries.count += 1
        try:
            return act()
        except StorageError:
            raise
        except Exception as error:  # foreign code: file systems raise what their client libraries raise
            pause_s = next(pauses, None) if is_transient(error) else None
            if pause_s is None:
                raise store_error(error, doing, url) from error
            _LOG.info("%s %s: %s; retrying in %.1f s", doing, url, error, pause_s)
            pause(pause_s)
