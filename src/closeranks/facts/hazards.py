"""How does the danger of losing a preemptible machine change with its age?

Machines that live at most a day are lost in a bathtub (arXiv 1911.05160): often in their first hours, rarely in the
middle, surely at the end. The share lost by age t has the form A (1 - e^(-t/early) + e^((t-life)/late)). Invariant:
``relative`` has mean 1 over a life, so that it bends a job's failure rate without changing how often it fails; the
constants are an assumption about shape, not a measurement of anybody's machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from closeranks.facts.intervals import young

_HOUR = 3600.0
_SAMPLES = 480


@dataclass(frozen=True, slots=True)
class Bathtub:
    share: float = 0.48
    """About half of the machines are lost early, half when their time is up."""
    early_s: float = 1.0 * _HOUR
    late_s: float = 0.8 * _HOUR
    life_s: float = 24.0 * _HOUR

    def lost_by(self, age_s: float) -> float:
        """Share of machines lost before this age."""
        early = 1 - math.exp(-age_s / self.early_s)
        late = math.exp((age_s - self.life_s) / self.late_s) - math.exp(-self.life_s / self.late_s)
        return self.share * (early + late)

    def hazard(self, age_s: float) -> float:
        """Losses per second among the machines that still live."""
        early = math.exp(-age_s / self.early_s) / self.early_s
        late = math.exp((age_s - self.life_s) / self.late_s) / self.late_s
        return self.share * (early + late) / (1 - self.lost_by(age_s))

    def relative(self, first_s: float, last_s: float) -> float:
        """Danger between two ages, against the mean over a whole life."""
        dead = -math.log(1 - self.lost_by(last_s)) + math.log(1 - self.lost_by(first_s))
        mean = -math.log(1 - self.lost_by(self.life_s)) / self.life_s
        return dead / (last_s - first_s) / mean


@dataclass(frozen=True, slots=True)
class Age:
    """A stretch of a machine's life, its danger against the mean, and the period that fits it."""

    first_s: float
    last_s: float
    danger: float
    period_s: float


EDGES_S = tuple(hours * _HOUR for hours in (0, 1, 3, 21, 23, 24))


def periods_by_age(
    tub: Bathtub, mtbf_s: float, cost_s: float, floor_s: float = 0.0, edges_s: Sequence[float] = EDGES_S
) -> tuple[Age, ...]:
    """Save as the danger of the hour asks: for a job whose machines all began together."""
    dangers = [(first, last, tub.relative(first, last)) for first, last in pairwise(edges_s)]
    return tuple(
        Age(first, last, danger, max(floor_s, young(mtbf_s / danger, cost_s))) for first, last, danger in dangers
    )


def gain(tub: Bathtub) -> float:
    """Share of the saving-and-redoing overhead that following the danger spares, against one period throughout.

    Overheads go with the square root of the rate, so it is 1 - mean(sqrt(danger)) / sqrt(mean(danger)).
    """
    edges = [tub.life_s * place / _SAMPLES for place in range(_SAMPLES + 1)]
    roots = [math.sqrt(tub.relative(first, last)) for first, last in pairwise(edges)]
    return 1 - sum(roots) / len(roots)
