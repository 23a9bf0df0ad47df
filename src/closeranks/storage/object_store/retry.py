"""How often, and how soon, is a store asked again?

One layer of retries, this one: those of the client library are switched off where that can be done, or eight tries of
ours would be two hundred of its own. Invariant: a refusal is never repeated, and the time spent on pauses is bounded.
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
    """Pauses double from ``first_s`` to ``longest_s``, each shortened by up to half at random: the ranks of a run meet
    the same throttling at the same moment, and must not come back together."""

    num_tries: int = 8
    first_s: float = 0.25
    longest_s: float = 10.0

    def delays(self, dice: Callable[[], float] = random.random) -> Iterator[float]:
        """One fewer than tries; ``dice`` gives numbers from 0 up to 1."""
        for turn in range(self.num_tries - 1):
            yield min(self.longest_s, self.first_s * 2**turn) * (1 - dice() / 2)


@dataclass(slots=True)
class RetryCount:
    """How often something was begun: an answer may be lost though the store did what it was asked."""

    count: int = 0


def retry(
    act: Callable[[], T],
    doing: str,
    url: str,
    patience: RetryPolicy,
    tries: RetryCount | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """``act`` until it succeeds; a ``StorageError`` once it is refused or patience ends. One that ``act`` itself raised
    is a verdict already, and passed on."""
    tries = tries if tries is not None else RetryCount()
    pauses = patience.delays()
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
