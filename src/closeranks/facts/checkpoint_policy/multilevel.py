"""Multilevel checkpointing: whether to save to nearer storage as well, and how often to each level.

There are kinds of failures: most leave the local disk intact, some lose it. Each level covers one kind; every n-th save
of a level also goes to the next one (Benoit et al., IEEE TC 2017: the overheads add up, each with its own best period,
nested by rounding). Invariant: the last level is always used, since it alone survives every failure; it also covers the
failures of a level that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from closeranks.facts.checkpoint_policy.save_interval import CheckpointLevel, best_period_s, daly_period_s, efficiency


@dataclass(frozen=True, slots=True)
class LevelSchedule:
    """A level in use: every ``every``-th save goes to it."""

    level: CheckpointLevel
    every: int
    period_s: float


@dataclass(frozen=True, slots=True)
class MultilevelSchedule:
    placed: tuple[LevelSchedule, ...]
    """From the nearest level to the last."""
    dropped: tuple[str, ...] = ()

    @property
    def period_s(self) -> float:
        """Work between two saves, of whatever level."""
        return self.placed[0].period_s

    @property
    def waste(self) -> float:
        """One minus the product of the levels' exact shares: about the sum of their overheads, but always below one."""
        return 1 - math.prod(efficiency(place.period_s, place.level) for place in self.placed)


def best_multilevel_schedule(levels: Sequence[CheckpointLevel], copy_s: float = 0.0) -> MultilevelSchedule:
    """The schedule that loses least with one level or two: of two, both or the last alone.

    ``copy_s`` is the cost of any save, wherever it goes; a level's own stall comes on top.
    """
    *nearer, last = levels
    alone = _nested([_covering_all(levels, last.stall_s + copy_s)], (1,))
    if not nearer:
        return alone
    both = _both(levels, copy_s)
    ratio = max(1.0, best_period_s(both[1]) / best_period_s(both[0]))
    ratio = ratio if math.isfinite(ratio) else 1.0  # a level without failures of its own is saved as often as the other
    found = [_nested(both, (1, every)) for every in range(math.floor(ratio), math.ceil(ratio) + 1)]
    dropping = replace(alone, dropped=tuple(level.name for level in nearer))
    return min(*found, dropping, key=lambda schedule: schedule.waste)


def waste_at(levels: Sequence[CheckpointLevel], period_s: float, copy_s: float = 0.0) -> float:
    """Share of time lost with a given period of the first of two levels and the last at its own best, unrounded."""
    first, last = _both(levels, copy_s)
    return 1 - efficiency(period_s, first) * efficiency(max(period_s, best_period_s(last)), last)


def _both(levels: Sequence[CheckpointLevel], copy_s: float) -> list[CheckpointLevel]:
    """Each level with its own failures; every save goes to the first."""
    first, last = levels
    return [_covering_all([first], first.stall_s + copy_s), _covering_all([last], last.stall_s)]


def _covering_all(levels: Sequence[CheckpointLevel], stall_s: float) -> CheckpointLevel:
    """The last level, which covers the failures of all."""
    rate = sum(level.rate for level in levels)
    return replace(levels[-1], mtbf_s=1 / rate if rate else math.inf, stall_s=stall_s)


def _nested(kept: Sequence[CheckpointLevel], counts: Sequence[int]) -> MultilevelSchedule:
    """The schedule at the best base period for given multiples: the levels act as one, with their costs divided by the
    multiples and their failures weighted by how much work each loses."""
    pairs = list(zip(kept, counts, strict=True))
    cost_s = sum(level.stall_s / count for level, count in pairs)
    rate = sum(level.rate * count for level, count in pairs)
    wanted = daly_period_s(1 / rate, cost_s) if rate else math.inf
    period_s = max(wanted, *(level.floor_s / count for level, count in pairs))
    return MultilevelSchedule(tuple(LevelSchedule(level, count, count * period_s) for level, count in pairs))
