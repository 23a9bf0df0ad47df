"""What was used between two readings of counters? Pure: two readings in, the figures of the interval out.

Invariant: a figure is left out where it cannot be known: a counter that is new, or that belongs to something else than
before (a process was moved to another control group).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment."""

    totals: Mapping[str, float] = field(default_factory=dict)
    """They only grow; reported is by how much."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """They grow too; reported is the growth per second: of processor seconds, the number of processors."""
    busiest: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Rates of several things of a kind (disks), of which the highest is reported."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Reported as they are."""
    words: tuple[str, ...] = ()
    subject: str = ""
    """What is counted; counters of different subjects cannot be compared."""


def used_between(before: Reading, after: Reading, seconds: float) -> dict[str, float]:
    """Whole numbers stay whole."""
    used = dict(after.levels)
    if before.subject != after.subject or seconds <= 0:
        return used
    used |= _growth(before.totals, after.totals)
    used |= {name: round(grown / seconds, 4) for name, grown in _growth(before.rates, after.rates).items()}
    for name, counters in after.busiest.items():
        grown = _growth(before.busiest.get(name, {}), counters).values()
        used |= {name: round(max(grown) / seconds, 4)} if grown else {}
    return used


def _growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """A child process that ended unseen, or a counter that was reset, must not make it negative."""
    pairs = {name: (before[name], value) for name, value in after.items() if name in before}
    return {name: round(max(0, now - then), 4) for name, (then, now) in pairs.items()}
