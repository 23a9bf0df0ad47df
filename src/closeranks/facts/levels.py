"""Which of several places should a job save to, how often each, and which is not worth its cost?

Failures are of kinds: most leave the local disk, some take it with them. Each level catches its kind; saves to a higher
level are every nth of the level below (Benoit et al., IEEE TC 2017: the overheads add up, each with its own best
period, nested by rounding). Invariant: the last level is always kept, for it alone survives every failure; a level that
is left out leaves its failures to the next one above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

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
    """The nesting that loses least, over all choices of levels.

    ``copy_s`` is what any save costs, wherever it goes; a level's own stall comes on top.
    """
    return min((_best_of(levels, chosen, copy_s) for chosen in _choices(len(levels))), key=lambda found: found.waste)


def waste_at(levels: Sequence[Level], period_s: float, copy_s: float = 0.0) -> float:
    """Share of time lost with a given period of the first level and the others at their own best, unrounded."""
    first, *others = _merged(levels, range(len(levels)), copy_s)
    kept = (efficiency(max(period_s, best_period_s(level)), level) for level in others)
    return 1 - efficiency(period_s, first) * math.prod(kept)


def _choices(num_levels: int) -> Iterator[tuple[int, ...]]:
    """All subsets that hold the last level, the largest first: of equals the first is kept."""
    for size in reversed(range(num_levels)):
        for lower in combinations(range(num_levels - 1), size):
            yield (*lower, num_levels - 1)


def _best_of(levels: Sequence[Level], chosen: Sequence[int], copy_s: float) -> Nesting:
    kept = _merged(levels, chosen, copy_s)
    periods = [best_period_s(level) for level in kept]
    multiples = [range(1, 2), *(_around(max(1.0, upper / lower)) for lower, upper in pairwise(periods))]
    found = (_placed(kept, counts, _base_period_s(kept, counts)) for counts in _chains(multiples))
    best = min(found, key=lambda nesting: nesting.waste)
    return replace(best, dropped=tuple(level.name for place, level in enumerate(levels) if place not in chosen))


def _merged(levels: Sequence[Level], chosen: Sequence[int], copy_s: float) -> list[Level]:
    """The chosen levels, with the failures of those left out below; every save is one of the first chosen."""
    kept: list[Level] = []
    first = 0
    for place in chosen:
        rate, level = sum(level.rate for level in levels[first : place + 1]), levels[place]
        stall_s = level.stall_s + (0.0 if kept else copy_s)
        kept.append(replace(level, mtbf_s=1 / rate if rate else math.inf, stall_s=stall_s))
        first = place + 1
    return kept


def _around(ratio: float) -> range:
    """Whole multiples next to a ratio; one whose lower level never saves of its own accord is its equal."""
    ratio = ratio if math.isfinite(ratio) else 1.0
    return range(max(1, math.floor(ratio)), math.ceil(ratio) + 1)


def _chains(multiples: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Counts relative to the first level, from multiples of neighbours."""
    for factors in product(*multiples):
        total, counts = 1, []
        for factor in factors:
            total *= factor
            counts.append(total)
        yield tuple(counts)


def _base_period_s(kept: Sequence[Level], counts: Sequence[int]) -> float:
    """The best base period for given multiples: the levels act as one, with their costs shared out and their failures
    weighed by how far each throws back."""
    cost_s = sum(level.stall_s / count for level, count in zip(kept, counts, strict=True))
    rate = sum(level.rate * count for level, count in zip(kept, counts, strict=True))
    wanted = daly(1 / rate, cost_s) if rate else math.inf
    return max(wanted, *(level.floor_s / count for level, count in zip(kept, counts, strict=True)))


def _placed(kept: Sequence[Level], counts: Sequence[int], period_s: float) -> Nesting:
    return Nesting(
        tuple(Placed(level, count, count * period_s) for level, count in zip(kept, counts, strict=True)),
    )
