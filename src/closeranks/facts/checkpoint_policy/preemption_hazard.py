"""The hazard rate of preemptible machines by age, and save intervals that follow it.

Machines that live at most a day have a bathtub-shaped hazard (arXiv 1911.05160): preemptions are frequent in the first
hours, rare in the middle and certain at the end. The share lost by age t has the form
A (1 - e^(-t/early) + e^((t-life)/late)). Invariant: ``hazard`` has mean 1 over a lifetime, so that it changes when a
job fails but not how often; the constants are an assumption about the shape, not measurements of real machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from closeranks.facts.checkpoint_policy.save_interval import young_period_s

_HOUR_S = 3600.0
LIFE_S = 24 * _HOUR_S
_SHARE, _EARLY_S, _LATE_S = 0.48, 1.0 * _HOUR_S, 0.8 * _HOUR_S
"""About half of the machines are lost early, half when their time is up."""
_EDGES_S = tuple(hours * _HOUR_S for hours in (0, 1, 3, 21, 23, 24))
_NUM_SAMPLES = 480


@dataclass(frozen=True, slots=True)
class AgeInterval:
    """An interval of a machine's age, its hazard relative to the mean, and the best save period in it."""

    first_s: float
    last_s: float
    danger: float
    period_s: float


def lost_by(age_s: float) -> float:
    """Share of machines lost before this age."""
    early = 1 - math.exp(-age_s / _EARLY_S)
    late = math.exp((age_s - LIFE_S) / _LATE_S) - math.exp(-LIFE_S / _LATE_S)
    return _SHARE * (early + late)


def hazard(first_s: float, last_s: float) -> float:
    """The hazard between two ages, relative to the mean over a whole lifetime."""
    dead = -math.log(1 - lost_by(last_s)) + math.log(1 - lost_by(first_s))
    mean = -math.log(1 - lost_by(LIFE_S)) / LIFE_S
    return dead / (last_s - first_s) / mean


def ages_of(mtbf_s: float, cost_s: float, floor_s: float) -> tuple[AgeInterval, ...]:
    """Save periods that follow the hazard, for a job whose machines all started together."""
    found = []
    for first, last in pairwise(_EDGES_S):
        how = hazard(first, last)
        found.append(AgeInterval(first, last, how, max(floor_s, young_period_s(mtbf_s / how, cost_s))))
    return tuple(found)


def hazards() -> tuple[list[float], list[float]]:
    """Consecutive ages over a whole lifetime, and the hazard from each to the next."""
    edges = [LIFE_S * place / _NUM_SAMPLES for place in range(_NUM_SAMPLES + 1)]
    return edges[:-1], [hazard(first, last) for first, last in pairwise(edges)]


def age_gain() -> float:
    """Share of the overhead (saves and lost work) that following the hazard saves, compared with one fixed period.

    The overhead grows with the square root of the rate, so it is 1 - mean(sqrt(hazard)) / sqrt(mean(hazard)).
    """
    roots = [math.sqrt(how) for how in hazards()[1]]
    return 1 - sum(roots) / len(roots)
