"""Exponential backoff with jitter: how long to wait before the next attempt.

Invariant: waits grow up to a bound, and the jitter keeps the hosts of a job from reconnecting all at once; with a seed
it is deterministic.
"""

from __future__ import annotations

import random


class Backoff:
    """Each wait is drawn between half of a bound and the whole of it; the bound doubles until ``longest_s``."""

    def __init__(self, first_s: float, longest_s: float, seed: int | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._bound_s = first_s
        self._chance = random.Random(seed)

    def next_s(self) -> float:
        bound = self._bound_s
        self._bound_s = min(2 * bound, self._longest_s)
        return bound * (1 - self._chance.random() / 2)

    def reset(self) -> None:
        self._bound_s = self._first_s
