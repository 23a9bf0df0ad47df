"""How long until the next try?

Invariant: waits grow to a bound, and chance keeps the hosts of a job from calling all at once; with a seed it is the
same chance each time.
"""

from __future__ import annotations

import random


class Backoff:
    """Each wait is up to twice the last: between a half and the whole of a bound that doubles until ``longest_s``."""

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
