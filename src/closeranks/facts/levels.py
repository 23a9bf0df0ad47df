"""Should a job save to a nearer place beside the one that survives every failure, and how often to each?

Failures are of kinds: most leave the local disk, some take it with them. Each level catches its kind; saves to the last
level are every nth of the one before it (Benoit et al., IEEE TC 2017: the overheads add up, each with its own best
period, nested by rounding). Invariant: the last level is always kept, for it alone survives every failure; a level that
is left out leaves its failures to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from closeranks.facts.intervals import Level, best_period_s, daly, efficiency


@dataclass(frozen=True, slots=True)
class Placed:
    """A level in use: every ``every``-th save goes there."""

    level: Level
    every: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Nesting:
    placed: tuple[Placed, ...]
    """From the nearest level to the last."""
    dropped: tuple[str, ...] = ()

    @property
    def period_s(self) -> float:
        """Work between two saves of any level."""
        return self.placed[0].period_s

    @property
    def waste(self) -> float:
        """The levels' exact shares multiplied: the sum of their overheads, kept below one."""
        return 1 - math.prod(efficiency(place.period_s, place.level) for place in self.placed)


def nest(levels: Sequence[Level], copy_s: float = 0.0) -> Nesting:
    """The nesting that loses least in one level or two: of two, both or the last alone.

    ``copy_s`` is what any save costs, wherever it goes; a level's own stall comes on top.
    """
    *nearer, last = levels
    alone = _nested([_catching(levels, last.stall_s + copy_s)], (1,))
    if not nearer:
        return alone
    both = _both(levels, copy_s)
    ratio = max(1.0, best_period_s(both[1]) / best_period_s(both[0]))
    ratio = ratio if math.isfinite(ratio) else 1.0  # one that never saves of its own accord is the other's equal
    found = [_nested(both, (1, every)) for every in range(math.floor(ratio), math.ceil(ratio) + 1)]
    dropping = replace(alone, dropped=tuple(level.name for level in nearer))
    return min(*found, dropping, key=lambda nesting: nesting.waste)


def waste_at(levels: Sequence[Level], period_s: float, copy_s: float = 0.0) -> float:
    """Share of time lost with a given period of the first of two levels and the last at its own best, unrounded."""
    first, last = _both(levels, copy_s)
    return 1 - efficiency(period_s, first) * efficiency(max(period_s, best_period_s(last)), last)


def _both(levels: Sequence[Level], copy_s: float) -> list[Level]:
    """Each with its own failures; every save is one of the first."""
    first, last = levels
    return [_catching([first], first.stall_s + copy_s), _catching([last], last.stall_s)]


def _catching(levels: Sequence[Level], stall_s: float) -> Level:
    """The last of the levels, with the failures of all."""
    rate = sum(level.rate for level in levels)
    return replace(levels[-1], mtbf_s=1 / rate if rate else math.inf, stall_s=stall_s)


def _nested(kept: Sequence[Level], counts: Sequence[int]) -> Nesting:
    """At the best base period for given multiples: the levels act as one, with their costs shared out and their
    failures weighed by how far each throws back."""
    pairs = list(zip(kept, counts, strict=True))
    cost_s = sum(level.stall_s / count for level, count in pairs)
    rate = sum(level.rate * count for level, count in pairs)
    wanted = daly(1 / rate, cost_s) if rate else math.inf
    period_s = max(wanted, *(level.floor_s / count for level, count in pairs))
    return Nesting(tuple(Placed(level, count, count * period_s) for level, count in pairs))
