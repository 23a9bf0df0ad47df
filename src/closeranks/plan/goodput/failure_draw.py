"""Draws the failures of a run: random numbers from a seed, apart from what the run does about them.

Invariant: the draw depends on hosts, duration and rates alone, so that strategies and numbers of spares are compared
under the same failures, and the same seed always draws the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from closeranks.facts.failures.failure_rates import FailureKind, FailureTable
from closeranks.plan.goodput.scenario import GoodputScenario

US = 1_000_000
"""Time is counted in whole microseconds, so that sums are exact."""


@dataclass(frozen=True, slots=True)
class DrawnFailure:
    at_us: int
    kind: FailureKind
    repair_us: int = 0
    """Until the lost hosts are back."""
    place: float = 0.0
    """In [0, 1): which of the hosts. One that is missing just then cannot fail."""
    copies: float = 1.0
    """In [0, 1]: both copies of a snapshot are lost if this is below the probability of that."""


def draw_failures(scenario: GoodputScenario, table: FailureTable, seed: int) -> tuple[DrawnFailure, ...]:
    """Memoryless failures of ``num_devices`` devices up to the end of the run, in order."""
    rng = Random(seed)
    rate = table.per_device_hour * scenario.num_devices / 3600
    if not rate:
        return ()
    weights = list(accumulate(kind.per_device_hour for kind in table.kinds))
    found, at_s = [], rng.expovariate(rate)
    while at_s < scenario.wall_s:
        (kind,) = rng.choices(table.kinds, cum_weights=weights)
        repair_s = rng.expovariate(1.0) * kind.repair_h * 3600
        found.append(DrawnFailure(round(at_s * US), kind, round(repair_s * US), rng.random(), rng.random()))
        at_s += rng.expovariate(rate)
    return tuple(found)
